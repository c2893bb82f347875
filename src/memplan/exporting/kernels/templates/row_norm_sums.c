/* Gradients of weight and bias. */
static void row_norm_sums(float *weight, float *bias, const float *g, const float *x, const float *mean,
                          const float *deviation, int rows, int size, int inner, int weights)
{
    for (int k = 0; k < weights; k++)
        weight[k] = bias[k] = 0;
    for (int r = 0; r < rows; r++, g += size, x += size)
        for (int k = 0; k < size; k++) {
            const int at = (r * (size / inner) + k / inner) % weights;
            bias[at] += g[k];
            weight[at] += g[k] * (x[k] - mean[r]) * deviation[r];
        }
}
