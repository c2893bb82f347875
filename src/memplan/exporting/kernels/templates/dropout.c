/* y may be x. */
static void dropout(float *y, const float *x, const unsigned char *bits, float scale, int n)
{
    for (int k = 0; k < n; k++)
        y[k] = bits[k / 8] >> k % 8 & 1 ? x[k] * scale : 0;
}
