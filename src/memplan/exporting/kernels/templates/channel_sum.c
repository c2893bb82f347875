/* Sum of each channel over the batch and its plane. */
static void channel_sum(float *y, const float *x, int batch, int channels, int plane)
{
    for (int c = 0; c < channels; c++) {
        float sum = 0;
        for (int b = 0; b < batch; b++)
            for (int k = 0; k < plane; k++)
                sum += x[(b * channels + c) * plane + k];
        y[c] = sum;
    }
}
