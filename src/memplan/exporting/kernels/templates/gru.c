/* One direction of a layer; act may be gates. States begin, or backwards end, with the first one; of_state gets the
   state's part of the new gate. */
static void gru(float *act, float *states, float *of_state, const float *gates, const float *w, const float *bias,
                int backwards, const float *h0, int steps, int batch, int hidden)
{
    const int size = batch * hidden;
    for (int k = 0; k < size; k++)
        states[(backwards ? steps * size : 0) + k] = h0[k];
    for (int step = 0; step < steps; step++) {
        const int t = backwards ? steps - 1 - step : step, now = (t + !backwards) * size, before = (t + backwards) * size;
        float *a = act + 3 * t * size, *part = of_state + t * size;
        for (int k = 0; k < 3 * size; k++)
            a[k] = gates[3 * t * size + k];
        for (int k = 0; k < size; k++)
            part[k] = 0;
        add_state(a, 3 * hidden, states + before, w, bias, batch, 2 * hidden, hidden);
        add_state(part, hidden, states + before, w + 2 * hidden * hidden, bias ? bias + 2 * hidden : 0, batch, hidden, hidden);
        for (int k = 0; k < size; k++) {
            float *r = a + k / hidden * 3 * hidden + k % hidden, *z = r + hidden, *n = z + hidden;
            *r = sigmoid(*r), *z = sigmoid(*z), *n = tanhf(*n + *r * part[k]);
            states[now + k] = *n + *z * (states[before + k] - *n);
        }
    }
}
