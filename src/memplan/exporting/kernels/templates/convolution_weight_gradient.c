/* Each weight's gradient is the sum of products of the rows that it joins. */
static void KERNEL(TARGET, const float *wide, const INPUT *narrow CONSTANTS, const convolution *c)
{
    const int plane = c->height * c->width, area = c->rows * c->columns, taps = c->kernel_h * c->kernel_w;
    for (int o = 0; o < c->groups * c->wide; o++)
        for (int i = 0; i < c->narrow; i++) {
            int weight = o * c->row + i * taps;
            for (int ky = 0; ky < c->kernel_h; ky++) {
                const int above = ky * c->step_h - c->pad_h;
                const int last = end_inside(above, c->stride_h, c->height, c->rows);
                for (int kx = 0; kx < c->kernel_w; kx++, weight++) {
                    const int left = kx * c->step_w - c->pad_w, first = first_inside(left, c->stride_w);
                    const int count = end_inside(left, c->stride_w, c->width, c->columns) - first;
                    float sum = 0;
                    for (int b = 0; b < c->batch; b++) {
                        const float *one = wide + (b * c->groups * c->wide + o) * area;
                        const INPUT *two = narrow + ((b * c->groups + o / c->wide) * c->narrow + i) * plane;
                        for (int r = first_inside(above, c->stride_h); r < last; r++) {
                            const float *g = one + r * c->columns + first;
                            const INPUT *x = two + (r * c->stride_h + above) * c->width + first * c->stride_w + left;
#if FLOATS
                            if (c->stride_w == 1) {
                                sum += count > 0 ? dot(g, x, count) : 0;
                                continue;
                            }
#endif
                            for (int k = 0; k < count; k++)
                                sum += g[k] * VALUE(x[k * c->stride_w], o / c->wide * c->narrow + i);
                        }
                    }
                    EMIT(weight, sum);
                }
            }
        }
}
