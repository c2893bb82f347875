/* Convolve. A panel holds what taps of the kernel read for WIDE positions of the result: of those that the same taps
   reach, which are one in phases_h x phases_w. Without such phases, positions go on from a row to the next. */
static void KERNEL(float *y, const INPUT *x CONSTANTS, const WEIGHT *w SCALES, const float *bias, const float *before,
                   const tiled_convolution *c)
{
    const int plane = c->height * c->width, area = c->rows * c->columns, phases = c->phases_h * c->phases_w;
    for (int k = 0; k < c->batch * c->groups * c->outer * area && before; k++)
        y[k] = before[k];
    for (int o = 0; o < c->batch * c->groups * c->outer && !before; o++) {
        const float start = bias ? bias[o % (c->groups * c->outer)] : 0;
        for (int k = 0; k < area; k++)
            y[o * area + k] = start;
    }
    for (int part = 0; part < c->batch * c->groups * phases; part++) {
        const int group = part / phases % c->groups, top = part % phases / c->phases_w, left = part % c->phases_w;
        const int lines = phases == 1 ? 1 : (c->rows - top + c->phases_h - 1) / c->phases_h;
        const int length = phases == 1 ? area : (c->columns - left + c->phases_w - 1) / c->phases_w;
        const int tiles = (length + WIDE - 1) / WIDE;
        for (int tile = 0; tile < lines * tiles; tile++) {
            const int line = tile / tiles, first = tile % tiles * WIDE, count = least(WIDE, length - first);
            float *result = y + part / phases * c->outer * area + (line * c->phases_h + top) * c->columns + left
                            + first * c->phases_w;
            int rows[WIDE], columns[WIDE], deep = 0;
            panel p;
            for (int j = 0; j < WIDE; j++) {
                rows[j] = (phases == 1 ? (first + j) / c->columns : line) * c->stride_h;
                columns[j] = (phases == 1 ? (first + j) % c->columns : first + j) * c->stride_w;
            }
            for (int tap = 0; tap < c->kernel_h * c->kernel_w; tap++) {
                const int down = top * c->stride_h + c->start_h + tap / c->kernel_w * c->step_h;
                const int along = left * c->stride_w + c->start_w + tap % c->kernel_w * c->step_w;
                int at[WIDE], adjacent = 1;
                if (down % c->phases_h || along % c->phases_w)
                    continue;
                for (int j = 0; j < WIDE; j++) {
                    const int row = rows[j] + down / c->phases_h, column = columns[j] + along / c->phases_w;
                    const int inside = j < count && row >= 0 && row < c->height && column >= 0 && column < c->width;
                    at[j] = inside ? row * c->width + column : -1;
                    adjacent = adjacent && inside && at[j] == at[0] + j;
                }
                for (int channel = 0, end; channel < c->inner; channel = end) {
                    const INPUT *from = x + (part / phases * c->inner + channel) * plane;
                    float *to = p.columns + deep * WIDE;
                    end = least(c->inner, channel + DEEP - deep);
                    if (adjacent)
                        for (int k = channel; k < end; k++, from += plane, to += WIDE)
                            for (int j = 0; j < WIDE; j++)
                                to[j] = INNER(k, from[at[0] + j]);
                    for (int j = 0; j < WIDE && !adjacent; j++)
                        if (at[j] < 0)
                            for (int k = 0; k < end - channel; k++)
                                to[k * WIDE + j] = 0;
                        else
                            for (int k = 0; k < end - channel; k++)
                                to[k * WIDE + j] = INNER(channel + k, from[k * plane + at[j]]);
                    for (; channel < end; channel++)
                        p.at[deep++] = group * c->by_group + channel * c->by_inner + tap;
                    p.at[deep] = -1;
                    if (deep == DEEP) {
                        ADD(result, w, &p, count, c);
                        deep = 0;
                    }
                }
            }
            if (deep)
                ADD(result, w, &p, count, c);
        }
    }
}
