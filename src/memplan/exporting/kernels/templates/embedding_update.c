/* The gradient of an embedding's table, each element of which is handed on once it is complete: that of a row is the sum
   over the places that read the row, in their order. */
static void KERNEL(TARGET, const float *g, const INDEX *rows, int n, int size, int count, int ignored)
{
    for (int entry = 0; entry < count; entry++) {
        int first = entry == ignored ? n : 0;
        while (first < n && (int)rows[first] != entry)
            first++;
        for (int j = 0; j < size; j++) {
            float sum = 0;
            for (int k = first; k < n; k++)
                if ((int)rows[k] == entry)
                    sum += g[k * size + j];
            EMIT(entry * size + j, sum);
        }
    }
}
