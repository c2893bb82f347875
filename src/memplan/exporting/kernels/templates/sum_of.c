/* Sums in eight lanes: fewer roundings than one after another, and compilers may use vectors. */
static float sum_of(const float *x, int n)
{
    float sums[8] = {0}, rest = 0;
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++)
            sums[j] += x[i + j];
    for (i = n - n % 8; i < n; i++) /* of at most 7: compilers see no overflow */
        rest += x[i];
    return rest + ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}
