static void embedding_gradient(float *table, const float *g, const int32_t *rows, int n, int size, int count, int ignored)
{
    for (int k = 0; k < count * size; k++)
        table[k] = 0;
    for (int k = 0; k < n; k++, g += size)
        for (int j = 0; rows[k] != ignored && rows[k] >= 0 && rows[k] < count && j < size; j++)
            table[rows[k] * size + j] += g[j];
}
