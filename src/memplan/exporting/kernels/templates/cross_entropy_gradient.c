/* Gradient of the loss and of the log-softmax at once; y may be the log-probabilities. */
static void KERNEL(float *y, const float *g, const float *x, const INDEX *target, const float *weight, const float *total,
                   int ignored, int reduced, int outer, int classes, int inner)
{
    for (int k = 0; k < outer * inner; k++) {
        const int label = (int)target[k], counts = label != ignored && label >= 0 && label < classes;
        const int begin = k / inner * classes * inner + k % inner;
        const float part = counts ? g[reduced ? 0 : k] * (weight ? weight[label] : 1) : 0;
        const float share = counts && reduced == 1 ? part / *total : part;
        for (int c = 0; c < classes; c++)
            y[begin + c * inner] = (expf(x[begin + c * inner]) - (c == label ? 1 : 0)) * share;
    }
}
