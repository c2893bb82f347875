/* Sum of products. Eight sums side by side: fewer roundings, and compilers may use vectors. */
static float dot(const float *a, const float *b, int n)
{
    float s0 = 0, s1 = 0, s2 = 0, s3 = 0, s4 = 0, s5 = 0, s6 = 0, s7 = 0, rest = 0;
    for (; n >= 8; n -= 8, a += 8, b += 8) {
        s0 += a[0] * b[0], s1 += a[1] * b[1], s2 += a[2] * b[2], s3 += a[3] * b[3];
        s4 += a[4] * b[4], s5 += a[5] * b[5], s6 += a[6] * b[6], s7 += a[7] * b[7];
    }
    for (; n > 0; n--)
        rest += *a++ * *b++;
    return rest + ((s0 + s4) + (s1 + s5)) + ((s2 + s6) + (s3 + s7));
}
