/* torch.optim.SGD of a weight in eight bits, which is scale * w[k]. The update is that of the real weight over the scale,
   rounded up or down at random, so that on average it is the real one. */
static void KERNEL(STATE *s, signed char *w, float scale, int k, float g)
{
    const float change = RATE * (GRADIENT(g) + DECAY * (scale * (float)w[k])) / scale;
    const float sum = drawn(s, (uint32_t)(w - s->int8) + (uint32_t)k) - change;
    if (sum != sum) /* not a number: the weight stays */
        return;
    const float within = sum > -255 ? sum < 255 ? sum : 255 : -255;
    const int down = (int)within - ((float)(int)within > within), next = w[k] + down;
    w[k] = (signed char)(next < -127 ? -127 : next > 127 ? 127 : next);
}
