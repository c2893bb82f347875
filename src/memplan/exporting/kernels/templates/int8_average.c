/* The mean of each window; padding is 0. */
static void int8_average(signed char *y, const signed char *x, const pool *p, int zero_x, int32_t factor, int shift,
                         int zero, int low, int high)
{
    for (int n = 0; n < p->planes; n++, x += p->height * p->width)
        for (int r = 0; r < p->rows; r++)
            for (int c = 0; c < p->columns; c++) {
                const int top = r * p->stride_h - p->pad_h, left = c * p->stride_w - p->pad_w;
                int32_t sum = 0;
                for (int i = top < 0 ? 0 : top; i < top + p->kernel_h && i < p->height; i++)
                    for (int j = left < 0 ? 0 : left; j < left + p->kernel_w && j < p->width; j++)
                        sum += x[i * p->width + j] - zero_x;
                *y++ = (signed char)int8_rescaled((int64_t)sum * factor, shift, zero, low, high);
            }
}
