static void int8_dequantize(float *y, const signed char *x, float scale, int zero, int n)
{
    for (int k = 0; k < n; k++)
        y[k] = scale * (float)(x[k] - zero);
}
