/* y[o, k, i] = x[o, index[o, k, i], i]; NAN where an index is out of range. */
static void KERNEL(float *y, const float *x, const INDEX *index, int outer, int size, int count, int inner)
{
    for (int o = 0; o < outer; o++)
        for (int k = 0; k < count * inner; k++) {
            const int at = (int)*index++;
            *y++ = at < 0 || at >= size ? NAN : x[(o * size + at) * inner + k % inner];
        }
}
