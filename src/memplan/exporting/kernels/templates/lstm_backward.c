/* The gradients of the gates, which may overwrite act, and of the first state and cell. */
static void lstm_backward(float *d, float *h, float *c, const float *act, const float *cells, const float *w,
                          const float *g, const float *g_cells, int backwards, int steps, int batch, int hidden)
{
    const int size = batch * hidden;
    for (int k = 0; k < size; k++)
        h[k] = c[k] = 0;
    for (int step = steps - 1; step >= 0; step--) {
        const int t = backwards ? steps - 1 - step : step, now = (t + !backwards) * size, before = (t + backwards) * size;
        for (int k = 0; k < size; k++) {
            const int at = 4 * t * size + k / hidden * 4 * hidden + k % hidden;
            const float i = act[at], f = act[at + hidden], fresh = act[at + 2 * hidden], o = act[at + 3 * hidden];
            const float end = tanhf(cells[now + k]), of_state = h[k] + g[t * size + k];
            const float of_cell = c[k] + of_state * o * (1 - end * end) + (g_cells ? g_cells[t * size + k] : 0);
            d[at] = of_cell * fresh * i * (1 - i);
            d[at + hidden] = of_cell * cells[before + k] * f * (1 - f);
            d[at + 2 * hidden] = of_cell * i * (1 - fresh * fresh);
            d[at + 3 * hidden] = of_state * end * o * (1 - o);
            c[k] = of_cell * f;
            h[k] = 0;
        }
        add_gates(h, d + 4 * t * size, 4 * hidden, w, batch, 4 * hidden, hidden);
    }
}
