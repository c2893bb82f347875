/* A linear layer. */
static void KERNEL(signed char *y, const INPUT *x, const int8_stage *c, int batch)
{
    for (; batch > 0; batch--, x += c->narrow) {
        const signed char *weight = c->weight;
        for (int o = 0; o < c->wide; o++) {
            const int32_t *rescale = c->rescale + 3 * o;
            int32_t sum = rescale[0];
            for (int i = 0; i < c->narrow; i++)
                sum += (int32_t)*weight++ * x[i];
            const int q = int8_rescaled((int64_t)sum * rescale[1], (int)rescale[2], c->result_zero, c->low, c->high);
            *y++ = c->table ? c->table[q + 128] : (signed char)q;
        }
    }
}
