/* Loss of log-probabilities [outer][classes][inner]: the mean, or the sum, of the classes' that count;
   NAN where a class is out of range. */
static void negative_log_likelihood(float *loss, float *total, const float *x, const int32_t *y, const float *weight,
                                    int ignored, int mean, int outer, int classes, int inner)
{
    float sum = 0, count = 0;
    for (int k = 0; k < outer * inner; k++)
        if (y[k] != ignored && (y[k] < 0 || y[k] >= classes)) {
            sum = NAN;
        } else if (y[k] != ignored) {
            const float share = weight ? weight[y[k]] : 1;
            sum -= share * x[(k / inner * classes + y[k]) * inner + k % inner];
            count += share;
        }
    *loss = mean ? sum / count : sum;
    if (total)
        *total = count;
}
