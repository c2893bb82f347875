/* Add a multiple of a row to another one. */
static void axpy(float *restrict y, const float *restrict x, float factor, int n)
{
    for (int i = 0; i < n; i++)
        y[i] += factor * x[i];
}
