/* y may be g or x. */
static void batch_norm_input_gradient(float *y, const float *g, const float *x, const float *weight, const float *mean,
                                      const float *deviation, const float *weight_sum, const float *bias_sum, int batch,
                                      int channels, int plane)
{
    const float count = (float)batch * (float)plane;
    for (int b = 0; b < batch; b++)
        for (int c = 0; c < channels; c++, g += plane, x += plane, y += plane) {
            const float factor = deviation[c] * (weight ? weight[c] : 1), shift = bias_sum[c] / count;
            const float slope = deviation[c] * weight_sum[c] / count;
            for (int k = 0; k < plane; k++)
                y[k] = (g[k] - shift - (x[k] - mean[c]) * slope) * factor;
        }
}
