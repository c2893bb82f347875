/* y = x, but y[o, index[o, k, i], i] = source[o, k, i], or a number, or with it added; y may be x. */
static void KERNEL(float *y, const float *x, const INDEX *index, const float *source, float value, int adds, int outer,
                    int size, int count, int inner)
{
    for (int k = 0; k < outer * size * inner; k++)
        y[k] = x[k];
    for (int o = 0; o < outer; o++)
        for (int k = 0; k < count * inner; k++) {
            const float one = source ? *source++ : value;
            const int at = (int)*index++;
            if (at >= 0 && at < size) {
                float *to = y + (o * size + at) * inner + k % inner;
                *to = adds ? *to + one : one;
            }
        }
}
