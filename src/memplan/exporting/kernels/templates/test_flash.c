
/* The weights file, as a program reads it that has a file system. */
#ifndef FLASH_FILE
#define FLASH_FILE "@NAME@.bin"
#endif
static float flash[(@UPPER@_FLASH_BYTES + 3) / 4];

static int is_read(void)
{
    FILE *file = fopen(FLASH_FILE, "rb");
    const size_t count = file ? fread(flash, 1, @UPPER@_FLASH_BYTES, file) : 0;
    if (file)
        fclose(file);
    return count == @UPPER@_FLASH_BYTES;
}
