static void int8_add(signed char *y, const signed char *a, const signed char *b, int zero_a, int32_t factor_a,
                     int zero_b, int32_t factor_b, int shift, int zero, int low, int high, int n)
{
    for (int k = 0; k < n; k++) {
        const int64_t sum = (int64_t)factor_a * (a[k] - zero_a) + (int64_t)factor_b * (b[k] - zero_b);
        y[k] = (signed char)int8_rescaled(sum, shift, zero, low, high);
    }
}
