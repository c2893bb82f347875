/* Sizes of four nested loops, the outermost first, and the step of each operand in each. */
typedef struct {
    int size[4], y[4], a[4], b[4], c[4];
} strided;
