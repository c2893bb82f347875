/* Along the middle of three dimensions; y may be x. A row of minus infinities becomes zeros where it is safe. */
static void softmax(float *y, const float *x, int outer, int size, int inner, int safe)
{
    for (int o = 0; o < outer; o++)
        for (int i = 0; i < inner; i++) {
            const int begin = o * size * inner + i, end = begin + size * inner;
            float most = x[begin], sum = 0;
            for (int k = begin; k < end; k += inner)
                most = x[k] > most ? x[k] : most;
            if (safe && most == -INFINITY)
                most = 0;
            for (int k = begin; k < end; k += inner)
                sum += y[k] = expf(x[k] - most);
            for (int k = begin; k < end; k += inner)
                y[k] = safe && sum == 0 ? 0 : y[k] / sum;
        }
}
