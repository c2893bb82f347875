/* Gradients of weight and bias. The scale is a reciprocal deviation; a variance where eps is not below 0. */
static void batch_norm_sums(float *weight, float *bias, const float *g, const float *x, const float *mean,
                            const float *scale, float eps, int batch, int channels, int plane)
{
    for (int c = 0; c < channels; c++) {
        float sum = 0, products = 0;
        for (int b = 0; b < batch; b++)
            for (int k = (b * channels + c) * plane, end = k + plane; k < end; k++) {
                sum += g[k];
                products += g[k] * (x[k] - mean[c]);
            }
        bias[c] = sum;
        weight[c] = products * (eps < 0 ? scale[c] : 1 / sqrtf(scale[c] + eps));
    }
}
