/* y[i, j] = scale * sum of x over three more loops; y is contiguous. */
static void reduce_sum(float *y, const float *x, float scale, const reduction *r)
{
    for (int i = 0; i < r->size[0]; i++)
        for (int j = 0; j < r->size[1]; j++) {
            float sum = 0;
            for (int k = 0; k < r->size[2]; k++)
                for (int l = 0; l < r->size[3]; l++)
                    for (int m = 0; m < r->size[4]; m++)
                        sum += x[i * r->step[0] + j * r->step[1] + k * r->step[2] + l * r->step[3] + m * r->step[4]];
            *y++ = sum * scale;
        }
}
