/* torch.optim.RMSprop */
static void KERNEL(STATE *s, int k, float g)
{
    float *w = &s->weights[k], *v = &s->squares[k];
    g = GRADIENT(g) + DECAY * *w;
    *v = ALPHA * *v + REST * g * g;
    g /= sqrtf(*v) + EPSILON;
#if HAS_MOMENTUM
    float *m = &s->momentum[k];
    *m = MOMENTUM * *m + g;
    g = *m;
#endif
    *w -= RATE * g;
}
