/* Gradients of a convolution's weights. A panel holds what WIDE weights of an outer channel meet in x, in a row for each
   position of the result; a tile adds up products with the gradients there. SHARING outer channels have the panel in common. */
#define SHARING (4 * WIDE)
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
                for (int k = 0; k < deep; k++)
                    p.at[k] = begin + k;
                p.at[deep] = -1;
                for (int j = 0; j < WIDE; j++) {
                    const int weight = first + (j < count ? j : 0), channel = weight / taps, tap = weight % taps;
                    const int along = c->start_w + tap % c->kernel_w * c->step_w;
                    int row = begin / c->columns * c->stride_h + c->start_h + tap / c->kernel_w * c->step_h;
                    int column = begin % c->columns;
                    for (float *to = p.columns + j, *end = to + deep * WIDE; to < end; row += c->stride_h, column = 0) {
                        const INPUT *line = from + channel * plane;
                        const int width = row >= 0 && row < c->height ? c->width : 0;
                        if (width)
                            line += row * width;
                        for (; column < c->columns && to < end; column++, to += WIDE) {
                            const int at = column * c->stride_w + along;
                            *to = at >= 0 && at < width ? VALUE(line[at], group * c->inner + channel) : 0;
                        }
                    }
                }
                for (int o = 0; o < channels; o += 4)
                    TILE(sums + o * WIDE, g + o * area, area, channels - o, &p);
            }
        }
        for (int o = 0; o < channels; o++)
            for (int j = 0; j < count; j++)
                EMIT((group * c->outer + outer + o) * c->by_outer + first + j, sums[o * WIDE + j]);
    }
}
#undef SHARING
