/* Four sums of products side by side, whose windows lie within the columns. What is above or below the plane is zero. */
static void KERNEL(int32_t *sums, const INPUT *x, const signed char *weight, const int8_stage *c, int channel, int rows,
                   int row, int column)
{
    const int taps = c->kernel_h * c->kernel_w, plane = rows * c->width, step = c->stride_w;
    int32_t outside = 0, s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    for (int ky = 0; ky < c->kernel_h; ky++) {
        const int r = row * c->stride_h - c->pad_h + ky * c->step_h;
        if (r < 0 || r >= c->height) {
            for (int kx = 0; kx < c->kernel_w; kx++, weight++)
                for (int i = 0; i < c->narrow; i++)
                    outside += (int32_t)weight[i * taps] * (c->zeros ? (int)c->zeros[channel + i] : c->zero);
            continue;
        }
        const INPUT *line = x + (channel * rows + r % rows) * c->width + column * step - c->pad_w;
        for (int kx = 0; kx < c->kernel_w; kx++, line += c->step_w) {
            const signed char *w = weight++;
            const INPUT *from = line;
            for (int i = c->narrow; step == 1 && i > 0; i--, from += plane, w += taps) {
                const int32_t factor = *w;
                s0 += factor * from[0];
                s1 += factor * from[1];
                s2 += factor * from[2];
                s3 += factor * from[3];
            }
            for (int i = c->narrow; step != 1 && i > 0; i--, from += plane - 3 * step, w += taps) {
                const int32_t factor = *w;
                s0 += factor * *from;
                s1 += factor * *(from += step);
                s2 += factor * *(from += step);
                s3 += factor * *(from += step);
            }
        }
    }
    sums[0] = s0 + outside;
    sums[1] = s1 + outside;
    sums[2] = s2 + outside;
    sums[3] = s3 + outside;
}
