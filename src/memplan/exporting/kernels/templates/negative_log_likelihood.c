/* Loss of log-probabilities [outer][classes][inner]: of each (reduced 0), the mean (1), or the sum (2) of the classes'
   that count; NAN where a class is out of range. */
static void KERNEL(float *loss, float *total, const float *x, const INDEX *y, const float *weight, int ignored,
                   int reduced, int outer, int classes, int inner)
{
    float sum = 0, count = 0;
    for (int k = 0; k < outer * inner; k++) {
        const int label = (int)y[k];
        float one = 0;
        if (label != ignored && (label < 0 || label >= classes)) {
            one = NAN;
        } else if (label != ignored) {
            const float share = weight ? weight[label] : 1;
            one = -share * x[(k / inner * classes + label) * inner + k % inner];
            count += share;
        }
        if (reduced == 0)
            loss[k] = one;
        sum += one;
    }
    if (reduced)
        *loss = reduced == 1 ? sum / count : sum;
    if (total)
        *total = count;
}
