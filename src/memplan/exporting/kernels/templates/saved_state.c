/* CRC-32, as zlib's. */
static uint32_t crc_32(uint32_t crc, const unsigned char *bytes, size_t count)
{
    static const uint32_t table[16] = {
        0x00000000u, 0x1DB71064u, 0x3B6E20C8u, 0x26D930ACu, 0x76DC4190u, 0x6B6B51F4u, 0x4DB26158u, 0x5005713Cu,
        0xEDB88320u, 0xF00F9344u, 0xD6D6A3E8u, 0xCB61B38Cu, 0x9B64C2B0u, 0x86D3D2D4u, 0xA00AE278u, 0xBDBDF21Cu,
    };
    crc = ~crc;
    for (size_t k = 0; k < count; k++) {
        crc ^= bytes[k];
        crc = (crc >> 4) ^ table[crc & 15];
        crc = (crc >> 4) ^ table[crc & 15];
    }
    return ~crc;
}

typedef char @NAME@_state_is_words[offsetof(STATE, @LAST@) + 4 == @UPPER@_SAVED_BYTES - 16 ? 1 : -1];

int @NAME@_save(const STATE *s, void *page, size_t size, @NAME@_write *write, void *context)
{
    const unsigned char *const state = (const unsigned char *)s;
    const size_t length = @UPPER@_SAVED_BYTES - 16;
    const uint32_t header[4] = {@MAGIC@u, @UPPER@_LAYOUT, @UPPER@_SAVED_BYTES - 16, crc_32(0, state, length)};
    unsigned char *const bytes = (unsigned char *)page;
    if (size < sizeof header)
        return @UPPER@_NO_ACCESS;
    for (size_t at = 0; at < sizeof header + length; at += size) {
        const size_t left = sizeof header + length - at;
        for (size_t k = 0; k < size; k++)
            bytes[k] = k >= left                ? 0xFF
                       : at + k < sizeof header ? ((const unsigned char *)header)[at + k]
                                                : state[at + k - sizeof header];
        if (write(context, at, page, left < size ? left : size))
            return @UPPER@_NO_ACCESS;
    }
    return 0;
}

int @NAME@_load(STATE *s, void *page, size_t size, @NAME@_read *read, void *context)
{
    unsigned char *const state = (unsigned char *)s, *const bytes = (unsigned char *)page;
    for (int copies = 0; copies < 2; copies++) { /* all is checked before anything is copied */
        uint32_t header[4] = {0, 0, 0, 0}, crc = 0;
        const size_t length = @UPPER@_SAVED_BYTES - 16;
        if (size < sizeof header)
            return @UPPER@_NO_ACCESS;
        for (size_t at = 0; at < sizeof header + length; at += size) {
            const size_t left = sizeof header + length - at, count = left < size ? left : size;
            const size_t first = at ? 0 : sizeof header;
            if (read(context, at, page, count))
                return @UPPER@_NO_ACCESS;
            for (size_t k = 0; k < first; k++)
                ((unsigned char *)header)[k] = bytes[k];
            if (header[0] != @MAGIC@u)
                return @UPPER@_NO_STATE;
            if (header[1] != @UPPER@_LAYOUT || header[2] != length)
                return @UPPER@_OTHER_EXPORT;
            crc = crc_32(crc, bytes + first, count - first);
            for (size_t k = first; copies && k < count; k++)
                state[at + k - sizeof header] = bytes[k];
        }
        if (crc != header[3])
            return @UPPER@_DAMAGED;
    }
    return 0;
}
