/* Wide is the side with the smaller planes, which a convolution makes; narrow the one that it reads. Channels are those of
   a group. Weights: [groups * wide][narrow][kernel_h][kernel_w], so many to a row. */
typedef struct {
    int batch, groups, narrow, height, width, wide, rows, columns;
    int kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, step_h, step_w, row;
} convolution;

/* First position whose partner, stride * position + offset, is not before 0. */
static int first_inside(int offset, int stride)
{
    return offset >= 0 ? 0 : (stride - 1 - offset) / stride;
}

/* End of the positions whose partner is before the size. */
static int end_inside(int offset, int stride, int size, int count)
{
    int end = size <= offset ? 0 : (size - 1 - offset) / stride + 1;
    return end < count ? end : count;
}
