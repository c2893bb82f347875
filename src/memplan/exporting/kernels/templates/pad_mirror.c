/* Planes with a border of what lies inside: mirrored at the edge, or the edge itself; or its gradient. */
static int inside(int at, int size, int mirrors)
{
    if (mirrors)
        return at < 0 ? -at : at >= size ? 2 * size - 2 - at : at;
    return at < 0 ? 0 : at >= size ? size - 1 : at;
}

static void pad_mirror(float *large, float *small, const pool *p, int mirrors, int backward)
{
    for (int n = 0; n < p->planes; n++, small += p->height * p->width) {
        for (int k = 0; backward && k < p->height * p->width; k++)
            small[k] = 0;
        for (int r = 0; r < p->rows; r++)
            for (int c = 0; c < p->columns; c++, large++) {
                float *at = small + inside(r - p->pad_h, p->height, mirrors) * p->width;
                at += inside(c - p->pad_w, p->width, mirrors);
                if (backward)
                    *at += *large;
                else
                    *large = *at;
            }
    }
}
