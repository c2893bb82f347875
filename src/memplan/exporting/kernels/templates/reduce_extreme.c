/* y[i, j] = the largest, or the smallest, of x over three more loops, or NAN if one is; y is contiguous. */
static void reduce_extreme(float *y, const float *x, int smallest, const reduction *r)
{
    for (int i = 0; i < r->size[0]; i++)
        for (int j = 0; j < r->size[1]; j++) {
            const float *from = x + i * r->step[0] + j * r->step[1];
            float best = *from;
            for (int k = 0; k < r->size[2]; k++)
                for (int l = 0; l < r->size[3]; l++)
                    for (int m = 0; m < r->size[4]; m++) {
                        const float one = from[k * r->step[2] + l * r->step[3] + m * r->step[4]];
                        if ((smallest ? one < best : one > best) || one != one)
                            best = one;
                    }
            *y++ = best;
        }
}
