/* Real elements of a weight in eight bits. */
static void int8_read(float *to, const signed char *w, const float *scale, int n, int row)
{
    for (int k = 0; k < n; k++)
        to[k] = scale[k / row] * (float)w[k];
}
