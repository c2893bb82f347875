/* Gradients of a convolution's weights. A panel holds what WIDE weights of an outer channel meet in x, in a row for each
   position of the result; a tile adds up products with the gradients there. SHARING channels use the same panel. */
static void KERNEL(TARGET, const float *gradient, const INPUT *x CONSTANTS, const tiled_convolution *c)
{
    const int plane = c->height * c->width, area = c->rows * c->columns, taps = c->kernel_h * c->kernel_w;
    const int blocks = (c->outer + SHARING - 1) / SHARING, tiles = (c->inner * taps + WIDE - 1) / WIDE;
    for (int part = 0; part < c->groups * blocks * tiles; part++) {
        const int group = part / tiles / blocks, outer = part / tiles % blocks * SHARING, first = part % tiles * WIDE;
        const int channels = least(SHARING, c->outer - outer), count = least(WIDE, c->inner * taps - first);
        float sums[SHARING * WIDE] = {0};
        panel p;
        for (int b = 0; b < c->batch; b++) {
            const INPUT *from = x + (b * c->groups + group) * c->inner * plane;
            const float *g = gradient + ((b * c->groups + group) * c->outer + outer) * area;
            for (int begin = 0, deep; begin < area; begin += DEEP) {
                deep = least(DEEP, area - begin);
                for (int k = 0; k < deep; k++) {
                    p.at[k] = begin + k;
                    p.row[k] = p.columns + k * WIDE;
                }
                p.at[deep] = -1;
                for (int j = 0; j < WIDE; j++) {
                    const int weight = first + least(j, count - 1), channel = weight / taps, tap = weight % taps;
                    const int along = c->start_w + tap % c->kernel_w * c->step_w;
                    const int inside = first_inside(along, c->stride_w);
                    const int outside = end_inside(along, c->stride_w, c->width, c->columns);
                    int row = begin / c->columns * c->stride_h + c->start_h + tap / c->kernel_w * c->step_h;
                    float *to = p.columns + j;
                    for (int column = begin % c->columns, k = 0; k < deep; row += c->stride_h, column = 0) {
                        const int end = least(c->columns, column + deep - k);
                        const int within = row >= 0 && row < c->height;
                        k += end - column;
                        for (; column < end && (!within || column < inside); column++, to += WIDE)
                            *to = 0;
                        for (; column < least(end, outside); column++, to += WIDE)
                            *to = VALUE(from[channel * plane + row * c->width + column * c->stride_w + along],
                                        group * c->inner + channel);
                        for (; column < end; column++, to += WIDE)
                            *to = 0;
                    }
                }
                for (int o = 0; o < channels; o += 4)
                    tile(sums + o * WIDE, WIDE, g + o * area, area, channels - o, &p);
            }
        }
        for (int o = 0; o < channels; o++)
            for (int j = 0; j < count; j++)
                EMIT((group * c->outer + outer + o) * c->by_outer + first + j, sums[o * WIDE + j]);
    }
}
