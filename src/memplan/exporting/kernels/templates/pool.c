/* Windows over planes: sizes of a plane, of its result, of a window, and its steps. */
typedef struct {
    int planes, height, width, rows, columns, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, step_h, step_w;
} pool;
