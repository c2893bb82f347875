/* Sum of products. Eight sums side by side, so that compilers may use vectors. */
static float dot(const float *a, const float *b, int n)
{
    float sums[8] = {0};
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++)
            sums[j] += a[i + j] * b[i + j];
    float sum = 0;
    for (i = n - n % 8; i < n; i++) /* of at most 7: compilers see no overflow */
        sum += a[i] * b[i];
    return sum + ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}
