/* The gradient of an embedding's table, each element of which is handed on once it is complete: that of a row is the sum
   over the places that read the row, in their order. Without ALL_ROWS the others are left out. With it, 256 rows at a time
   are looked for among the places; those that none reads get zeros. */
static void KERNEL(TARGET, const float *g, const INDEX *rows, int n, int size, int count, int ignored)
{
    uint32_t read[8] = {0};
    for (int place = 0; place < (ALL_ROWS ? count : n); place++) {
        const int entry = ALL_ROWS ? place : (int)rows[place];
        for (int k = 0; k < 8 && ALL_ROWS && place % 256 == 0; k++)
            read[k] = 0;
        for (int k = 0; k < n && ALL_ROWS && place % 256 == 0; k++) {
            const int row = (int)rows[k];
            if (row != ignored && row >= place && row - place < 256)
                read[(row - place) / 32] |= (uint32_t)1 << (row - place) % 32;
        }
        int first = !ALL_ROWS && entry != ignored ? 0 : n;
        if (ALL_ROWS && read[place % 256 / 32] >> place % 32 & 1)
            first = 0;
        while (first < n && (int)rows[first] != entry)
            first++;
        if (!ALL_ROWS && (first != place || entry < 0 || entry >= count))
            continue;
        int end = first; /* mostly no other place reads the row: then the loop below is over at once */
        for (int k = first; k < n; k++)
            end = (int)rows[k] == entry ? k + 1 : end;
        for (int j = 0; j < size; j++) {
            float sum = 0;
            for (int k = first; k < end; k++)
                if ((int)rows[k] == entry)
                    sum += g[k * size + j];
            EMIT(entry * size + j, sum);
        }
    }
}
