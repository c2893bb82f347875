/* Largest of each window, and its place in the window, where that is wanted. */
static void max_pool(float *y, unsigned char *places, const float *x, const pool *p)
{
    for (int n = 0; n < p->planes; n++, x += p->height * p->width)
        for (int r = 0; r < p->rows; r++)
            for (int c = 0; c < p->columns; c++) {
                float most = -INFINITY;
                int place = -1;
                for (int k = 0; k < p->kernel_h * p->kernel_w; k++) {
                    const int i = r * p->stride_h - p->pad_h + k / p->kernel_w * p->step_h;
                    const int j = c * p->stride_w - p->pad_w + k % p->kernel_w * p->step_w;
                    if (i < 0 || j < 0 || i >= p->height || j >= p->width)
                        continue;
                    const float found = x[i * p->width + j];
                    if (place < 0 || found > most || found != found) {
                        most = found;
                        place = k;
                    }
                }
                *y++ = most;
                if (places)
                    *places++ = (unsigned char)place;
            }
}
