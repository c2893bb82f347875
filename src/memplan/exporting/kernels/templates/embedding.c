static void embedding(float *y, const float *table, const int32_t *rows, int n, int size)
{
    for (int k = 0; k < n; k++, y += size)
        for (int j = 0; j < size; j++)
            y[j] = table[rows[k] * size + j];
}
