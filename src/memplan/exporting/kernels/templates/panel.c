/* Matrix products in tiles: sums of four rows by WIDE columns, as many as fit in registers. A panel lists rows of WIDE
   factors, which lie in it or elsewhere, and where the other factors of each begin; -1 is the end of the list. */
#if !defined(WIDE) && !defined(__AVX__) && defined(__x86_64__) && defined(__GNUC__) && defined(__OPTIMIZE__)
#define BY_CPU /* tiles in SSE2 and in AVX with FMA: the processor decides when the program runs */
#define WIDE 16
#endif
#ifdef WIDE
#elif defined(__AVX__)
#define WIDE 16
#elif defined(__SSE__) || defined(__ARM_NEON)
#define WIDE 8
#else
#define WIDE 4
#endif
#if WIDE != 4 && WIDE != 8 && WIDE != 16
#error "WIDE is 4, 8 or 16"
#endif
/* SHARING: rows of sums that use a panel; DEEP: rows of a panel. An AVR has 2 KB of SRAM, or a few more. */
#ifdef __AVR__
#define SHARING 8
#else
#define SHARING (WIDE == 4 ? 32 : 64)
#endif
#ifndef DEEP
#ifdef __AVR__
#define DEEP 8
#else
#define DEEP (16 * WIDE)
#endif
#endif

typedef struct {
    int at[DEEP + 1];
    const float *row[DEEP];
    float columns[DEEP * WIDE];
} panel;

static int least(int a, int b) { return a < b ? a : b; }
