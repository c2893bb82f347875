/* Planes of another size: the nearest element, or between two in each direction; or the gradient of that. */
static float place(int at, float scale, int linear, int corners)
{
    const float found = !linear || corners ? scale * (float)at : scale * ((float)at + 0.5f) - 0.5f;
    return found < 0 ? 0 : found;
}

static void resize(float *large, float *small, const pool *p, float rows, float columns, int linear, int corners, int backward)
{
    for (int n = 0; n < p->planes; n++, small += p->height * p->width) {
        for (int k = 0; backward && k < p->height * p->width; k++)
            small[k] = 0;
        for (int r = 0; r < p->rows; r++)
            for (int c = 0; c < p->columns; c++, large++) {
                const float y = place(r, rows, linear, corners), x = place(c, columns, linear, corners);
                const int top = (int)y < p->height ? (int)y : p->height - 1, left = (int)x < p->width ? (int)x : p->width - 1;
                const int down = top + 1 < p->height ? p->width : 0, right = left + 1 < p->width ? 1 : 0;
                const float v = linear ? y - (float)top : 0, h = linear ? x - (float)left : 0;
                float *at = small + top * p->width + left;
                if (backward) {
                    at[0] += *large * (1 - v) * (1 - h);
                    at[right] += *large * (1 - v) * h;
                    at[down] += *large * v * (1 - h);
                    at[down + right] += *large * v * h;
                } else {
                    *large = (1 - v) * ((1 - h) * at[0] + h * at[right]) + v * ((1 - h) * at[down] + h * at[down + right]);
                }
            }
    }
}
