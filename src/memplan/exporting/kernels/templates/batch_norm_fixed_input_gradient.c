static void batch_norm_fixed_input_gradient(float *y, const float *g, const float *weight, const float *variance, float eps,
                                            int batch, int channels, int plane)
{
    for (int b = 0; b < batch; b++)
        for (int c = 0; c < channels; c++, g += plane, y += plane) {
            const float factor = (weight ? weight[c] : 1) / sqrtf(variance[c] + eps);
            for (int k = 0; k < plane; k++)
                y[k] = g[k] * factor;
        }
}
