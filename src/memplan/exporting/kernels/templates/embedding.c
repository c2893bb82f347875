/* A row beyond the table reads as zeros. */
static void KERNEL(float *y, const float *table, const INDEX *rows, int n, int size, int count)
{
    for (int k = 0; k < n; k++, y += size) {
        const int row = (int)rows[k];
        for (int j = 0; j < size; j++)
            y[j] = row >= 0 && row < count ? table[row * size + j] : 0;
    }
}
