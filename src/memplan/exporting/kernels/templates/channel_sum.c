/* Sum of each channel over the batch and its plane. */
static void channel_sum(float *y, const float *x, int batch, int channels, int plane)
{
    for (int c = 0; c < channels; c++, x += plane) {
        y[c] = 0;
        for (int b = 0; b < batch; b++)
            y[c] += sum_of(x + b * channels * plane, plane);
    }
}
