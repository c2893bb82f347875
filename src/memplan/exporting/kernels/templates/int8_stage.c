/* An integer convolution: of what it reads narrow channels of a group, of its result wide ones, or wide of a group. Each
   channel has a bias, less the products of all weights and zeros, a multiplier and a shift in rescale; kept rows of the
   result are in memory at once. */
typedef struct {
    const signed char *weight;
    const int32_t *rescale, *zeros;
    const signed char *table;
    int narrow, height, width, wide, group, rows, columns, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w;
    int step_h, step_w, zero, result_zero, low, high, kept, start, size;
} int8_stage;
