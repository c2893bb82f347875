/* A product; each element of b is for `inner` elements of a. */
static void int8_multiply(signed char *y, const signed char *a, const signed char *b, int zero_a, int zero_b,
                          int32_t factor, int shift, int zero, int low, int high, int inner, int n)
{
    for (int k = 0; k < n; k++) {
        const int64_t product = (int64_t)factor * ((int32_t)(a[k] - zero_a) * (b[k / inner] - zero_b));
        y[k] = (signed char)int8_rescaled(product, shift, zero, low, high);
    }
}
