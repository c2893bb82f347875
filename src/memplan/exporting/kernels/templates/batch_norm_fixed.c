/* By the running statistics. */
static void batch_norm_fixed(float *y, const float *x, const float *weight, const float *bias, const float *mean,
                             const float *variance, float eps, int batch, int channels, int plane)
{
    for (int b = 0; b < batch; b++)
        for (int c = 0; c < channels; c++, x += plane, y += plane) {
            const float factor = (weight ? weight[c] : 1) / sqrtf(variance[c] + eps), term = bias ? bias[c] : 0;
            for (int k = 0; k < plane; k++)
                y[k] = (x[k] - mean[c]) * factor + term;
        }
}
