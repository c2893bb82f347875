/* Wide is the side with the smaller planes, which a convolution makes; narrow the one that it reads. Channels are those of
   a group. Weights: [groups * wide][narrow][kernel_h][kernel_w], so many to a row. */
typedef struct {
    int batch, groups, narrow, height, width, wide, rows, columns;
    int kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, step_h, step_w, row;
} convolution;
