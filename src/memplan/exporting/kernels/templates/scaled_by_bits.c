/* Elements whose bit is set as they are, others times a slope; y may be x. */
static void scaled_by_bits(float *y, const float *x, const unsigned char *bits, float slope, int n)
{
    for (int k = 0; k < n; k++)
        y[k] = bits[k / 8] >> k % 8 & 1 ? x[k] : x[k] * slope;
}
