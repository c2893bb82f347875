/* y may be g. */
static void softmax_gradient(float *y, const float *g, const float *result, int outer, int size, int inner)
{
    for (int o = 0; o < outer; o++)
        for (int i = 0; i < inner; i++) {
            const int begin = o * size * inner + i, end = begin + size * inner;
            float sum = 0;
            for (int k = begin; k < end; k += inner)
                sum += g[k] * result[k];
            for (int k = begin; k < end; k += inner)
                y[k] = (g[k] - sum) * result[k];
        }
}
