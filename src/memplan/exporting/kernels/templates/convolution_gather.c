/* Convolve: each row of weights adds a multiple of a row of x to a row of y; to what was there before, if anything. */
static void KERNEL(float *y, const INPUT *x CONSTANTS, const WEIGHT *w SCALES, const float *bias, const float *before,
                   const convolution *c)
{
    const int plane = c->height * c->width, area = c->rows * c->columns;
    for (int b = 0; b < c->batch; b++)
        for (int o = 0; o < c->groups * c->wide; o++, y += area) {
            const INPUT *from = x + (b * c->groups + o / c->wide) * c->narrow * plane;
            const WEIGHT *weight = w + o * c->row;
            for (int k = 0; k < area; k++)
                y[k] = before ? *before++ : bias ? bias[o] : 0;
            for (int i = 0; i < c->narrow; i++, from += plane)
                for (int ky = 0; ky < c->kernel_h; ky++) {
                    const int above = ky * c->step_h - c->pad_h;
                    const int last = end_inside(above, c->stride_h, c->height, c->rows);
                    for (int kx = 0; kx < c->kernel_w; kx++) {
                        const int left = kx * c->step_w - c->pad_w, first = first_inside(left, c->stride_w);
                        const int count = end_inside(left, c->stride_w, c->width, c->columns) - first;
                        const float factor = SCALED(o, *weight++);
                        for (int r = first_inside(above, c->stride_h); r < last; r++) {
                            float *to = y + r * c->columns + first;
                            const INPUT *row = from + (r * c->stride_h + above) * c->width + first * c->stride_w + left;
#if FLOATS
                            if (c->stride_w == 1) {
                                axpy(to, row, factor, count);
                                continue;
                            }
#endif
                            for (int k = 0; k < count; k++)
                                to[k] += factor * VALUE(row[k * c->stride_w], o / c->wide * c->narrow + i);
                        }
                    }
                }
        }
}
