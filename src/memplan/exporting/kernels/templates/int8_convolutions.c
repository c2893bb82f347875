/* Convolutions one behind another. A row is computed as soon as the next convolution reads it, and between two of them no
   more rows are in memory than a row reads. */
static void KERNEL(signed char *y, signed char *between, const INPUT *x, const int8_stage *c, int stages, int batch)
{
    int done[16];
    const int8_stage *last = c + stages - 1;
    for (; batch > 0; batch--, x += c->size, y += last->wide * last->rows * last->columns) {
        for (int k = 0; k < stages; k++)
            done[k] = 0;
        while (done[stages - 1] < last->rows) {
            int k = stages - 1;
            for (; k > 0; k--) { /* the last convolution that has what its next row reads */
                const int end = done[k] * c[k].stride_h - c[k].pad_h + (c[k].kernel_h - 1) * c[k].step_h + 1;
                if (done[k - 1] >= (end < c[k].height ? end : c[k].height))
                    break;
            }
            signed char *to = k == stages - 1 ? y : between + c[k].start;
            if (k == 0)
                FIRST_ROW(to, x, c, c->height, done[k]);
            else
                ROW(to, between + c[k - 1].start, c + k, c[k - 1].kept, done[k]);
            done[k]++;
        }
    }
}
