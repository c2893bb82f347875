/* z may be x. */
static void mean_squares_gradient(float *z, const float *g, const float *x, const float *y, float divisor, int n)
{
    const float factor = 2 * *g / divisor;
    for (int k = 0; k < n; k++)
        z[k] = factor * (x[k] - y[k]);
}
