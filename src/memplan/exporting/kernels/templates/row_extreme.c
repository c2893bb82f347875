/* Along the middle of three dimensions the largest or smallest element, the first of equals, and its index. */
static void row_extreme(float *y, float *index, const float *x, int smallest, int outer, int size, int inner)
{
    for (int o = 0; o < outer; o++)
        for (int i = 0; i < inner; i++) {
            const float *from = x + o * size * inner + i;
            int best = 0;
            for (int k = 1; k < size; k++) {
                const float one = from[k * inner], before = from[best * inner];
                if (before == before && ((smallest ? one < before : one > before) || one != one))
                    best = k;
            }
            if (y)
                *y++ = from[best * inner];
            if (index)
                *index++ = (float)best;
        }
}
