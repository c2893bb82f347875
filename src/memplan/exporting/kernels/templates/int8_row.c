/* Compute a row of all channels, of which the operand has so many rows in memory. */
static void KERNEL(signed char *y, const INPUT *x, const int8_stage *c, int rows, int row)
{
    enum { TILE = 32 };
    int32_t sums[TILE];
    for (int o = 0; o < c->wide; o++)
        for (int start = 0; start < c->columns; start += TILE) {
            const int32_t *rescale = c->rescale + 3 * o;
            const int count = c->columns - start < TILE ? c->columns - start : TILE;
            const signed char *weight = c->weight + o * c->narrow * c->kernel_h * c->kernel_w;
            signed char *to = y + (o * c->kept + row % c->kept) * c->columns + start;
            for (int k = 0; k < count; k++)
                sums[k] = rescale[0];
            for (int i = 0; i < c->narrow; i++) {
                const int channel = o / c->group * c->narrow + i, zero = c->zeros ? (int)c->zeros[channel] : c->zero;
                for (int ky = 0; ky < c->kernel_h; ky++, weight += c->kernel_w) {
                    const int r = row * c->stride_h + ky * c->step_h - c->pad_h;
                    if (r < 0 || r >= c->height)
                        continue;
                    const INPUT *from = x + (channel * rows + r % rows) * c->width;
                    for (int kx = 0; kx < c->kernel_w; kx++) {
                        const int left = start * c->stride_w + kx * c->step_w - c->pad_w, factor = weight[kx];
                        const int end = end_inside(left, c->stride_w, c->width, count);
                        for (int k = first_inside(left, c->stride_w); k < end; k++)
                            sums[k] += (int32_t)factor * (from[left + k * c->stride_w] - zero);
                    }
                }
            }
            for (int k = 0; k < count; k++) {
                const int64_t product = (int64_t)sums[k] * rescale[1];
                const int q = int8_rescaled(product, (int)rescale[2], c->result_zero, c->low, c->high);
                to[k] = c->table ? c->table[q + 128] : (signed char)q;
            }
        }
}
