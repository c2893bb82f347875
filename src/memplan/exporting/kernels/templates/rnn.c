/* One direction of a layer; act may be gates. States begin, or backwards end, with the first one. */
static void KERNEL(float *act, float *states, const float *gates, const float *w, const float *bias, int backwards,
                   const float *h0, int steps, int batch, int hidden)
{
    const int size = batch * hidden;
    for (int k = 0; k < size; k++)
        states[(backwards ? steps * size : 0) + k] = h0[k];
    for (int step = 0; step < steps; step++) {
        const int t = backwards ? steps - 1 - step : step, now = (t + !backwards) * size, before = (t + backwards) * size;
        for (int k = 0; k < size; k++)
            act[t * size + k] = gates[t * size + k];
        add_state(act + t * size, hidden, states + before, w, bias, batch, hidden, hidden);
        for (int k = 0; k < size; k++)
            states[now + k] = act[t * size + k] = ACTIVATED(act[t * size + k]);
    }
}
