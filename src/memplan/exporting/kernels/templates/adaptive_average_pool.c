/* Windows that share a plane out as evenly as they can: the sums, or the parts of their gradients. */
static void adaptive_average_pool(float *small, float *large, const pool *p, int backward)
{
    for (int n = 0; n < p->planes; n++, large += p->height * p->width) {
        for (int k = 0; backward && k < p->height * p->width; k++)
            large[k] = 0;
        for (int r = 0; r < p->rows; r++)
            for (int c = 0; c < p->columns; c++, small++) {
                const int top = r * p->height / p->rows, bottom = ((r + 1) * p->height + p->rows - 1) / p->rows;
                const int left = c * p->width / p->columns, right = ((c + 1) * p->width + p->columns - 1) / p->columns;
                const float count = (float)((bottom - top) * (right - left)), part = backward ? *small / count : 0;
                float sum = 0;
                for (int i = top; i < bottom; i++)
                    for (int j = left; j < right; j++)
                        if (backward)
                            large[i * p->width + j] += part;
                        else
                            sum += large[i * p->width + j];
                if (!backward)
                    *small = sum / count;
            }
    }
}
