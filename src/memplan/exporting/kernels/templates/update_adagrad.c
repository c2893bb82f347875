/* torch.optim.Adagrad */
static void KERNEL(STATE *s, int k, float g)
{
    float *w = &s->weights[k], *v = &s->squares[k];
    g = GRADIENT(g) + DECAY * *w;
    *v += g * g;
    *w -= RATE FALLING * g / (sqrtf(*v) + EPSILON);
}
