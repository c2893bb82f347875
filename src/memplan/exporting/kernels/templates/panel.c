/* Matrix products in tiles: sums of four rows by WIDE columns, as many as fit in registers. A panel holds factors of WIDE
   columns, one row after another, and where the other factor of each begins; -1 is the end of the list. */
#ifdef WIDE
#elif defined(__AVX__)
#define WIDE 16
#elif defined(__SSE__) || defined(__ARM_NEON)
#define WIDE 8
#else
#define WIDE 4
#endif
#define DEEP (16 * WIDE)
#define SHARING (WIDE == 4 ? 32 : 64) /* rows of sums that use a panel */

typedef struct {
    int at[DEEP + 1];
    float columns[DEEP * WIDE];
} panel;

static int least(int a, int b) { return a < b ? a : b; }
