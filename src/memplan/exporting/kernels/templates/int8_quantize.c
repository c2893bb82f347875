/* Floats as integers, rounded half to even. */
static void int8_quantize(signed char *y, const float *x, float reciprocal, int zero, int n)
{
    const float low = (float)(-128 - zero), high = (float)(127 - zero);
    for (int k = 0; k < n; k++) {
        const float scaled = x[k] * reciprocal;
        y[k] = (signed char)((int)rintf(scaled < low ? low : scaled > high ? high : scaled) + zero);
    }
}
