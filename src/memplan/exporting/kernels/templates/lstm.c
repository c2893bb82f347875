/* One direction of a layer; act may be gates. States and cells begin, or backwards end, with the first ones. */
static void lstm(float *act, float *states, float *cells, const float *gates, const float *w, const float *bias,
                 int backwards, const float *h0, const float *c0, int steps, int batch, int hidden)
{
    const int size = batch * hidden;
    for (int k = 0; k < size; k++) {
        states[(backwards ? steps * size : 0) + k] = h0[k];
        cells[(backwards ? steps * size : 0) + k] = c0[k];
    }
    for (int step = 0; step < steps; step++) {
        const int t = backwards ? steps - 1 - step : step, now = (t + !backwards) * size, before = (t + backwards) * size;
        float *a = act + 4 * t * size;
        for (int k = 0; k < 4 * size; k++)
            a[k] = gates[4 * t * size + k];
        add_state(a, 4 * hidden, states + before, w, bias, batch, 4 * hidden, hidden);
        for (int k = 0; k < size; k++) {
            float *i = a + k / hidden * 4 * hidden + k % hidden, *f = i + hidden, *g = f + hidden, *o = g + hidden;
            *i = sigmoid(*i), *f = sigmoid(*f), *g = tanhf(*g), *o = sigmoid(*o);
            cells[now + k] = *f * cells[before + k] + *i * *g;
            states[now + k] = *o * tanhf(cells[now + k]);
        }
    }
}
