/* The same rows the other way: what a convolution by these weights gathers from y is added to y. */
static void KERNEL(float *y, const float *x, const WEIGHT *w SCALES, const float *bias, const float *before,
                   const convolution *c)
{
    const int plane = c->height * c->width, area = c->rows * c->columns, taps = c->kernel_h * c->kernel_w;
    for (int b = 0; b < c->batch; b++)
        for (int i = 0; i < c->groups * c->narrow; i++, y += plane) {
            const int group = i / c->narrow;
            const float *from = x + (b * c->groups + group) * c->wide * area;
            for (int k = 0; k < plane; k++)
                y[k] = before ? *before++ : bias ? bias[i] : 0;
            for (int o = 0; o < c->wide; o++, from += area) {
                const WEIGHT *weight = w + (group * c->wide + o) * c->row + i % c->narrow * taps;
                for (int ky = 0; ky < c->kernel_h; ky++) {
                    const int above = ky * c->step_h - c->pad_h;
                    const int last = end_inside(above, c->stride_h, c->height, c->rows);
                    for (int kx = 0; kx < c->kernel_w; kx++) {
                        const int left = kx * c->step_w - c->pad_w, first = first_inside(left, c->stride_w);
                        const int count = end_inside(left, c->stride_w, c->width, c->columns) - first;
                        const float factor = SCALED(group * c->wide + o, *weight++);
                        for (int r = first_inside(above, c->stride_h); r < last; r++) {
                            float *to = y + (r * c->stride_h + above) * c->width + first * c->stride_w + left;
                            const float *row = from + r * c->columns + first;
                            if (c->stride_w == 1)
                                axpy(to, row, factor, count);
                            else
                                for (int k = 0; k < count; k++)
                                    to[k * c->stride_w] += factor * row[k];
                        }
                    }
                }
            }
        }
}
