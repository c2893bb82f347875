/* Gradients of weight and bias. The scale is a reciprocal deviation; a variance where eps is not below 0. */
static void batch_norm_sums(float *weight, float *bias, const float *g, const float *x, const float *mean,
                            const float *scale, float eps, int batch, int channels, int plane)
{
    const int step = channels * plane;
    for (int c = 0; c < channels; c++, g += plane, x += plane) {
        float sum = 0, products = 0;
        for (int b = 0; b < batch; b++) {
            sum += sum_of(g + b * step, plane);
            products += moment(g + b * step, 0, x + b * step, mean[c], plane);
        }
        bias[c] = sum;
        weight[c] = products * (eps < 0 ? scale[c] : 1 / sqrtf(scale[c] + eps));
    }
}
