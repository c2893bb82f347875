static void average_pool_gradient(float *y, const float *g, const pool *p, int counts_padding, int given)
{
    for (int n = 0; n < p->planes; n++, y += p->height * p->width) {
        for (int k = 0; k < p->height * p->width; k++)
            y[k] = 0;
        for (int r = 0; r < p->rows; r++)
            for (int c = 0; c < p->columns; c++) {
                const int top = r * p->stride_h - p->pad_h, left = c * p->stride_w - p->pad_w;
                const float part = *g++ / divisor(p, top, left, counts_padding, given);
                for (int i = top < 0 ? 0 : top; i < top + p->kernel_h && i < p->height; i++)
                    for (int j = left < 0 ? 0 : left; j < left + p->kernel_w && j < p->width; j++)
                        y[i * p->width + j] += part;
            }
    }
}
