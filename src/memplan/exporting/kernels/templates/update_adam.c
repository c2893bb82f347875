/* torch.optim.Adam and AdamW; s->correction holds 1 - beta ^ step of both betas,
   and the rests are 1 - beta: computed in double, for which float32 has too few digits. */
static void KERNEL(STATE *s, int k, float g)
{
    float *w = &s->weights[k], *m = &s->momentum[k], *v = &s->squares[k];
    const float rate = RATE, *correction = s->correction + GROUP * 2;
    g = GRADIENT(g);
    if (DECOUPLED)
        *w -= rate * DECAY * *w;
    else
        g += DECAY * *w;
    *m += REST1 * (g - *m);
    *v = BETA2 * *v + REST2 * g * g;
#if AMSGRAD
    float *most = &s->maxima[k];
    *most = *v > *most ? *v : *most;
    v = most;
#endif
    *w -= rate / correction[0] * *m / (sqrtf(*v) / sqrtf(correction[1]) + EPSILON);
}
