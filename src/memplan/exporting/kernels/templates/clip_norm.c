/* torch.nn.utils.clip_grad_norm_ */
static void clip_norm(float *g, float most, int n)
{
    const float scale = most / (sqrtf(dot(g, g, n)) + 1e-6f);
    for (int k = 0; k < n && !(scale >= 1); k++)
        g[k] *= scale;
}
