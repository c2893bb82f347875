/* A row beyond the table reads as zeros. */
static void embedding(float *y, const float *table, const int32_t *rows, int n, int size, int count)
{
    for (int k = 0; k < n; k++, y += size)
        for (int j = 0; j < size; j++)
            y[j] = rows[k] >= 0 && rows[k] < count ? table[rows[k] * size + j] : 0;
}
