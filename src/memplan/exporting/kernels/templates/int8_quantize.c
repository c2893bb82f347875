/* Floats as integers, rounded half away from 0. */
static void int8_quantize(signed char *y, const float *x, float reciprocal, int zero, int n)
{
    const float low = (float)(-128 - zero), high = (float)(127 - zero);
    for (int k = 0; k < n; k++) {
        const float scaled = x[k] * reciprocal, within = scaled < low ? low : scaled > high ? high : scaled;
        const int whole = (int)within;
        const float rest = within - (float)whole;
        y[k] = (signed char)(whole + zero + (rest >= 0.5f) - (rest <= -0.5f));
    }
}
