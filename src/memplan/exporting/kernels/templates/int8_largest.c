/* The largest element of each window. */
static void int8_largest(signed char *y, const signed char *x, const pool *p)
{
    for (int n = 0; n < p->planes; n++, x += p->height * p->width)
        for (int r = 0; r < p->rows; r++)
            for (int c = 0; c < p->columns; c++) {
                int most = -128;
                for (int k = 0; k < p->kernel_h * p->kernel_w; k++) {
                    const int i = r * p->stride_h - p->pad_h + k / p->kernel_w * p->step_h;
                    const int j = c * p->stride_w - p->pad_w + k % p->kernel_w * p->step_w;
                    if (i >= 0 && j >= 0 && i < p->height && j < p->width && x[i * p->width + j] > most)
                        most = x[i * p->width + j];
                }
                *y++ = (signed char)most;
            }
}
