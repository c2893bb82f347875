/* The gradients of the gates, which may overwrite act, and of the first state. */
static void KERNEL(float *d, float *h, const float *act, const float *w, const float *g, int backwards, int steps, int batch,
                   int hidden)
{
    const int size = batch * hidden;
    for (int k = 0; k < size; k++)
        h[k] = 0;
    for (int step = steps - 1; step >= 0; step--) {
        const int t = backwards ? steps - 1 - step : step;
        for (int k = 0; k < size; k++) {
            const float y = act[t * size + k];
            d[t * size + k] = (h[k] + g[t * size + k]) * SLOPE(y);
            h[k] = 0;
        }
        add_gates(h, d + t * size, hidden, w, batch, hidden, hidden);
    }
}
