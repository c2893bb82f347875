static void KERNEL(float *table, const float *g, const INDEX *rows, int n, int size, int count, int ignored)
{
    for (int k = 0; k < count * size; k++)
        table[k] = 0;
    for (int k = 0; k < n; k++, g += size) {
        const int row = (int)rows[k];
        for (int j = 0; row != ignored && row >= 0 && row < count && j < size; j++)
            table[row * size + j] += g[j];
    }
}
