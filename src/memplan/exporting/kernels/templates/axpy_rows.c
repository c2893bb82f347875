/* Add multiples of rows to y: of row k of b, the factor a[k * step]. Four at a time, so that y is seldom stored. */
static void axpy_rows(float *restrict y, const float *a, int step, const float *restrict b, int row, int rows, int n)
{
    for (; rows >= 4; rows -= 4, a += 4 * step, b += 4 * row) {
        const float f0 = a[0], f1 = a[step], f2 = a[2 * step], f3 = a[3 * step];
        const float *restrict b1 = b + row, *restrict b2 = b1 + row, *restrict b3 = b2 + row;
        for (int i = 0; i < n; i++)
            y[i] += (f0 * b[i] + f1 * b1[i]) + (f2 * b2[i] + f3 * b3[i]);
    }
    for (; rows > 0; rows--, a += step, b += row)
        axpy(y, b, *a, n);
}
