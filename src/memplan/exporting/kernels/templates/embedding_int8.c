/* The same of a table in eight bits: each row has its own scale. */
static void embedding_int8(float *y, const signed char *table, const float *scale, const int32_t *rows, int n, int size,
                           int count)
{
    for (int k = 0; k < n; k++, y += size)
        for (int j = 0; j < size; j++)
            y[j] = rows[k] >= 0 && rows[k] < count ? scale[rows[k]] * (float)table[rows[k] * size + j] : 0;
}
