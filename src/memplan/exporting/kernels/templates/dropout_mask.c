/* A bit for each element: whether it stays. */
static void dropout_mask(unsigned char *bits, uint32_t *random, uint32_t below, int n)
{
    for (int k = 0; k < n; k++) {
        if (k % 8 == 0)
            bits[k / 8] = 0;
        if (next_random(random) >= below)
            bits[k / 8] = (unsigned char)(bits[k / 8] | 1 << k % 8);
    }
}
