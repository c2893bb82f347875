/* Mean and reciprocal deviation of each channel; running ones move towards them, the variance without bias. Where an
   element is not finite, they stay: no later step would mend them. */
static void batch_norm_statistics(float *mean, float *deviation, const float *x, float *running_mean,
                                  float *running_variance, float momentum, float eps, int batch, int channels, int plane)
{
    const float count = (float)batch * (float)plane;
    const int step = channels * plane;
    for (int c = 0; c < channels; c++, x += plane) {
        float sum = 0, squares = 0;
        for (int b = 0; b < batch; b++)
            sum += sum_of(x + b * step, plane);
        const float average = sum / count;
        for (int b = 0; b < batch; b++)
            squares += moment(x + b * step, average, x + b * step, average, plane);
        mean[c] = average;
        deviation[c] = 1 / sqrtf(squares / count + eps);
        if (running_mean && squares - squares == 0) {
            running_mean[c] += momentum * (average - running_mean[c]);
            running_variance[c] += momentum * (squares / (count - 1) - running_variance[c]);
        }
    }
}
