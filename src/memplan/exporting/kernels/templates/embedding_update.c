/* The gradient of an embedding's table, each element of which is handed on once it is complete: that of a row is the sum
   over the places that read the row, in their order. With ALL_ROWS these are all rows, else those that are read: the sum
   is made at the first place of a row. */
static void KERNEL(TARGET, const float *g, const INDEX *rows, int n, int size, int count, int ignored)
{
    for (int place = 0; place < (ALL_ROWS ? count : n); place++) {
        const int entry = ALL_ROWS ? place : (int)rows[place];
        int first = entry == ignored ? n : 0;
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
