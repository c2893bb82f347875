/* The gradients of the gates, which may overwrite act, of the first state, and of the state's part of the new gate. */
static void gru_backward(float *d, float *h, float *d_of_state, const float *act, const float *states, const float *of_state,
                         const float *w, const float *g, int backwards, int steps, int batch, int hidden)
{
    const int size = batch * hidden;
    for (int k = 0; k < size; k++)
        h[k] = 0;
    for (int step = steps - 1; step >= 0; step--) {
        const int t = backwards ? steps - 1 - step : step, before = (t + backwards) * size;
        for (int k = 0; k < size; k++) {
            const int at = 3 * t * size + k / hidden * 3 * hidden + k % hidden;
            const float r = act[at], z = act[at + hidden], n = act[at + 2 * hidden];
            const float of_output = h[k] + g[t * size + k], of_new = of_output * (1 - z) * (1 - n * n);
            d[at] = of_new * of_state[t * size + k] * r * (1 - r);
            d[at + hidden] = of_output * (states[before + k] - n) * z * (1 - z);
            d[at + 2 * hidden] = of_new;
            d_of_state[t * size + k] = of_new * r;
            h[k] = of_output * z;
        }
        add_gates(h, d + 3 * t * size, 3 * hidden, w, batch, 2 * hidden, hidden);
        add_gates(h, d_of_state + t * size, hidden, w + 2 * hidden * hidden, batch, hidden, hidden);
    }
}
