/* Add to four rows of WIDE sums the products of four rows of a, or of as many as there are, by a panel. Rows of sums are
   `step` apart, which has to be WIDE where that is more than 4. */
#define ARGUMENTS float *restrict sums, int step, const WEIGHT *restrict a, int row, int rows, const panel *restrict p
#ifdef BY_CPU
static inline __attribute__((always_inline)) void BODY(ARGUMENTS)
#else
static void KERNEL(ARGUMENTS)
#endif
{
    const int second = rows > 1 ? row : 0, third = rows > 2 ? 2 * row : 0, fourth = rows > 3 ? 3 * row : 0;
    const float *const *next = p->row;
#if WIDE > 4 /* a constant step: compilers see that rows do not overlap, and use vectors */
    (void)step;
    for (const int *at = p->at; *at >= 0; at++) {
        const WEIGHT *w = a + *at;
        const float *b = *next++;
        const float w0 = (float)w[0], w1 = (float)w[second], w2 = (float)w[third], w3 = (float)w[fourth];
        for (int j = 0; j < WIDE; j++) {
            sums[j] += w0 * b[j];
            sums[WIDE + j] += w1 * b[j];
            sums[2 * WIDE + j] += w2 * b[j];
            sums[3 * WIDE + j] += w3 * b[j];
        }
    }
#else /* without vectors, compilers keep variables in registers, not arrays */
#define EACH(i) DO(i, 0) DO(i, 1) DO(i, 2) DO(i, 3)
    float *const sums0 = sums, *const sums1 = sums0 + step, *const sums2 = sums1 + step, *const sums3 = sums2 + step;
#define DO(i, j) float s##i##j = sums##i[j];
    EACH(0) EACH(1) EACH(2) EACH(3)
#undef DO
#define DO(i, j) s##i##j += w##i * b##j;
    for (const int *at = p->at; *at >= 0; at++) {
        const WEIGHT *w = a + *at;
        const float *b = *next++;
        const float b0 = b[0], b1 = b[1], b2 = b[2], b3 = b[3];
        const float w0 = (float)w[0], w1 = (float)w[second], w2 = (float)w[third], w3 = (float)w[fourth];
        EACH(0) EACH(1) EACH(2) EACH(3)
    }
#undef DO
#define DO(i, j) sums##i[j] = s##i##j;
    EACH(0) EACH(1) EACH(2) EACH(3)
#undef DO
#undef EACH
#endif
}

#ifdef BY_CPU
static __attribute__((target("avx,fma"))) void FUSED(ARGUMENTS) { BODY(sums, step, a, row, rows, p); }
static void KERNEL(ARGUMENTS)
{
    if (__builtin_cpu_supports("fma"))
        FUSED(sums, step, a, row, rows, p);
    else
        BODY(sums, step, a, row, rows, p);
}
#endif
#undef ARGUMENTS
