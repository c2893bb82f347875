/* Along the middle of three dimensions; y may be x. */
static void log_softmax(float *y, const float *x, int outer, int size, int inner)
{
    for (int o = 0; o < outer; o++)
        for (int i = 0; i < inner; i++) {
            const int begin = o * size * inner + i, end = begin + size * inner;
            float most = x[begin], sum = 0;
            for (int k = begin; k < end; k += inner)
                most = x[k] > most ? x[k] : most;
            for (int k = begin; k < end; k += inner)
                sum += expf(x[k] - most);
            const float whole = most + logf(sum);
            for (int k = begin; k < end; k += inner)
                y[k] = x[k] - whole;
        }
}
