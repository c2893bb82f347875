static void max_pool_gradient(float *y, const float *g, const unsigned char *places, const pool *p)
{
    for (int n = 0; n < p->planes; n++, y += p->height * p->width) {
        for (int k = 0; k < p->height * p->width; k++)
            y[k] = 0;
        for (int r = 0; r < p->rows; r++)
            for (int c = 0; c < p->columns; c++) {
                const int place = *places++;
                const int i = r * p->stride_h - p->pad_h + place / p->kernel_w * p->step_h;
                const int j = c * p->stride_w - p->pad_w + place % p->kernel_w * p->step_w;
                y[i * p->width + j] += *g++;
            }
    }
}
