/* Convolve. A panel holds what taps of the kernel read for WIDE positions of the result: of those that the same taps
   reach, which are one in phases_h x phases_w. Without such phases, positions go on from a row to the next. What lies
   side by side in x stays there. */
static void KERNEL(float *y, const INPUT *x CONSTANTS, const WEIGHT *w SCALES, const float *bias, const float *before,
                   const tiled_convolution *c)
{
    const int plane = c->height * c->width, area = c->rows * c->columns, phases = c->phases_h * c->phases_w;
    for (int k = 0; k < c->batch * c->groups * c->outer * area && before; k++)
        y[k] = before[k];
    for (int o = 0; o < c->batch * c->groups * c->outer && !before; o++)
        fill(y + o * area, bias ? bias[o % (c->groups * c->outer)] : 0, area);
    for (int part = 0; part < c->batch * c->groups * phases; part++) {
        const int group = part / phases % c->groups, top = part % phases / c->phases_w, left = part % c->phases_w;
        const int lines = phases == 1 ? 1 : (c->rows - top + c->phases_h - 1) / c->phases_h;
        const int length = phases == 1 ? area : (c->columns - left + c->phases_w - 1) / c->phases_w;
        const int tiles = (length + WIDE - 1) / WIDE;
        int met = phases == 1;
        for (int tap = 0; tap < c->kernel_h * c->kernel_w && !met; tap++)
            met = (top * c->stride_h + c->start_h + tap / c->kernel_w * c->step_h) % c->phases_h == 0
                  && (left * c->stride_w + c->start_w + tap % c->kernel_w * c->step_w) % c->phases_w == 0;
        for (int tile = 0; tile < lines * tiles && met; tile++) {
            const int line = tile / tiles, first = tile % tiles * WIDE, count = least(WIDE, length - first);
            float *result = y + part / phases * c->outer * area + (line * c->phases_h + top) * c->columns + left
                            + first * c->phases_w;
            int rows[WIDE], columns[WIDE], deep = 0;
            panel p;
            rows[0] = phases == 1 ? first / c->columns : line;
            columns[0] = phases == 1 ? first % c->columns : first;
            for (int j = 1; j < WIDE; j++) {
                const int next = phases == 1 && columns[j - 1] + 1 == c->columns;
                rows[j] = rows[j - 1] + next;
                columns[j] = next ? 0 : columns[j - 1] + 1;
            }
            const int together = count == WIDE && rows[0] == rows[WIDE - 1], steps = (WIDE - 1) * c->stride_w;
            for (int tap = 0, ky = 0, kx = 0; ky < c->kernel_h; tap++) {
                const int down = top * c->stride_h + c->start_h + ky * c->step_h, above = down / c->phases_h;
                const int along = left * c->stride_w + c->start_w + kx * c->step_w, before_first = along / c->phases_w;
                const int height = rows[0] * c->stride_h + above, within = height >= 0 && height < c->height;
                const int start = columns[0] * c->stride_w + before_first;
                const int straight = together && within && start >= 0 && start + steps < c->width;
                if (++kx == c->kernel_w)
                    kx = 0, ky++;
                if (above * c->phases_h != down || before_first * c->phases_w != along)
                    continue;
                int at[WIDE] = {0}, reached = straight;
                at[0] = height * c->width + start;
                if (together && !within)
                    continue;
                for (int j = 0; j < WIDE && !straight; j++) {
                    const int y_row = rows[j] * c->stride_h + above, column = columns[j] * c->stride_w + before_first;
                    at[j] = -1;
                    if (j < count && y_row >= 0 && y_row < c->height && column >= 0 && column < c->width)
                        at[j] = y_row * c->width + column, reached = 1;
                }
                if (!reached)
                    continue;
                for (int channel = 0, end; channel < c->inner; channel = end) {
                    const INPUT *from = x + (part / phases * c->inner + channel) * plane;
                    const int more = least(c->inner - channel, DEEP - deep), *to = p.at + deep + more;
                    float *row = p.columns + deep * WIDE;
                    end = channel + more;
#if IN_PLACE
                    if (straight && c->stride_w == 1) {
                        from += at[0];
                        for (int k = deep; k < deep + more; k++, from += plane)
                            p.row[k] = from;
                    } else
#endif
                    for (int k = channel; k < end; k++, from += plane, row += WIDE) {
                        p.row[deep + k - channel] = row;
                        for (int j = 0; j < WIDE && straight; j++)
                            row[j] = INNER(k, from[at[0] + j * c->stride_w]);
                        for (int j = 0; j < WIDE && !straight; j++)
                            row[j] = at[j] < 0 ? 0 : INNER(k, from[at[j]]);
                    }
                    int weight = group * c->by_group + channel * c->by_inner + tap;
                    for (int *next = p.at + deep; next != to; weight += c->by_inner)
                        *next++ = weight;
                    deep += more;
                    if (deep == DEEP) {
                        p.at[deep] = -1;
                        ADD(result, w, &p, count, c);
                        deep = 0;
                    }
                }
            }
            p.at[deep] = -1;
            if (deep)
                ADD(result, w, &p, count, c);
        }
    }
}
