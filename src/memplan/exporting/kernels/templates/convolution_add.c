/* Add to `count` positions of all outer channels what a panel of a convolution contributes. */
static void KERNEL(float *y, const WEIGHT *w SCALES, const panel *p, int count, const tiled_convolution *c)
{
    for (int o = 0; o < c->outer; o += 4) {
        if (DIRECT && count == WIDE && c->phases_w == 1 && o + 4 <= c->outer) {
            TILE(y + o * c->rows * c->columns, c->rows * c->columns, w + o * c->by_outer, c->by_outer, 4, p);
            continue;
        }
        float sums[4 * WIDE] = {0}, *sum = sums;
        TILE(sums, WIDE, w + o * c->by_outer, c->by_outer, c->outer - o, p);
        for (int i = o; i < least(o + 4, c->outer); i++, sum += WIDE) {
            float *to = y + i * c->rows * c->columns;
            for (int j = 0; j < count; j++, to += c->phases_w)
                *to += SCALED(i, sum[j]);
        }
    }
}
