/* A bit for each element: whether it is within bounds, which are not part of the range. */
static void pack_inside(unsigned char *bits, const float *x, float low, float high, int n)
{
    for (int k = 0; k < n; k++) {
        if (k % 8 == 0)
            bits[k / 8] = 0;
        if (!(x[k] <= low || x[k] >= high))
            bits[k / 8] = (unsigned char)(bits[k / 8] | 1 << k % 8);
    }
}
