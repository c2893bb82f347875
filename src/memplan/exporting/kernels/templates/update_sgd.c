/* torch.optim.SGD */
static void KERNEL(STATE *s, int k, float g)
{
    float *w = &s->weights[k];
    g = GRADIENT(g) + DECAY * *w;
#if HAS_MOMENTUM
    float *m = &s->momentum[k];
    *m = s->step == 1 ? g : MOMENTUM * *m + UNDAMPED * g;
    g = NESTEROV ? g + MOMENTUM * *m : *m;
#endif
    *w -= RATE * g;
}
