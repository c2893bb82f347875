/* Compute a row of all channels, of which the operand has so many rows in memory: four columns at a time, the last of
   them twice where their number asks for it. */
static void KERNEL(signed char *y, const INPUT *x, const int8_stage *c, int rows, int row)
{
    const int first = (c->pad_w + c->stride_w - 1) / c->stride_w, taps = c->kernel_h * c->kernel_w;
    const int room = c->width + c->pad_w - 1 - (c->kernel_w - 1) * c->step_w, end = room < 0 ? 0 : room / c->stride_w + 1;
    for (int o = 0; o < c->wide; o++) {
        const int32_t *rescale = c->rescale + 3 * o;
        const signed char *weight = c->weight + o * c->narrow * taps;
        const int channel = o / c->group * c->narrow;
        signed char *to = y + (o * c->kept + row % c->kept) * c->columns;
        for (int at = 0, count; at < c->columns; at += count) {
            int32_t sums[4];
            count = end - first >= 4 && at >= first && at < end ? 4 : 1;
            if (count == 4) {
                at = at + 4 <= end ? at : end - 4;
                FOUR(sums, x, weight, c, channel, rows, row, at);
            } else
                sums[0] = ONE(x, weight, c, channel, rows, row, at);
            for (int k = 0; k < count; k++) {
                const int64_t product = (int64_t)(rescale[0] + sums[k]) * rescale[1];
                const int q = int8_rescaled(product, (int)rescale[2], c->result_zero, c->low, c->high);
                to[at + k] = c->table ? c->table[q + 128] : (signed char)q;
            }
        }
    }
}
