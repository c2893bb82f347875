/* The same of a table in eight bits: each row has its own scale. */
static void KERNEL(float *y, const signed char *table, const float *scale, const INDEX *rows, int n, int size, int count)
{
    for (int k = 0; k < n; k++, y += size) {
        const int row = (int)rows[k];
        for (int j = 0; j < size; j++)
            y[j] = row >= 0 && row < count ? scale[row] * (float)table[row * size + j] : 0;
    }
}
