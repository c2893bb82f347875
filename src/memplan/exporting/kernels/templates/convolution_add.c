/* Add to `count` positions of all outer channels what a panel of a convolution contributes. */
static void KERNEL(float *y, const WEIGHT *w, const float *scale, const panel *p, int count, const tiled_convolution *c)
{
    for (int o = 0; o < c->outer; o += 4) {
        float sums[4 * WIDE] = {0};
        TILE(sums, w + o * c->by_outer, c->by_outer, c->outer - o, p);
        for (int i = 0; i < 4 && o + i < c->outer; i++) {
            float *to = y + (o + i) * c->rows * c->columns, *sum = sums + i * WIDE;
            for (int j = 0; j < count; j++)
                to[j * c->phases_w] += scale ? scale[o + i] * sum[j] : sum[j];
        }
    }
}
