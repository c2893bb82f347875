/* A convolution in tiles, or its transpose: `outer` channels of rows x columns are sums over `inner` channels of
   height x width. Tap k of the kernel joins row r with source row (r * stride_h + start_h + k * step_h) / phases_h, where
   that is whole; columns alike. The last three: steps in the weights from a group or channel to the next. */
typedef struct {
    int batch, groups, inner, height, width, outer, rows, columns, kernel_h, kernel_w, stride_h, stride_w;
    int start_h, start_w, step_h, step_w, phases_h, phases_w, by_group, by_outer, by_inner;
} tiled_convolution;
