/* A bit for each element: whether it is above 0, or not below or equal. */
static void pack_bits(unsigned char *bits, const float *x, int only_above, int n)
{
    for (int k = 0; k < n; k++) {
        if (k % 8 == 0)
            bits[k / 8] = 0;
        if (only_above ? x[k] > 0 : !(x[k] <= 0))
            bits[k / 8] = (unsigned char)(bits[k / 8] | 1 << k % 8);
    }
}
