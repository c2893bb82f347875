static void to_float(float *y, const int32_t *x, int n)
{
    for (int k = 0; k < n; k++)
        y[k] = (float)x[k];
}
