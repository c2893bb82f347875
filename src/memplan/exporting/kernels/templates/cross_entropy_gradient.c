/* Gradient of the loss and of the log-softmax at once; y may be the log-probabilities. */
static void cross_entropy_gradient(float *y, const float *g, const float *x, const int32_t *target, const float *weight,
                                   const float *total, int ignored, int mean, int outer, int classes, int inner)
{
    for (int k = 0; k < outer * inner; k++) {
        const int counts = target[k] != ignored && target[k] >= 0 && target[k] < classes;
        const int begin = k / inner * classes * inner + k % inner;
        const float share = counts ? *g * (weight ? weight[target[k]] : 1) / (mean ? *total : 1) : 0;
        for (int c = 0; c < classes; c++)
            y[begin + c * inner] = (expf(x[begin + c * inner]) - (c == target[k] ? 1 : 0)) * share;
    }
}
