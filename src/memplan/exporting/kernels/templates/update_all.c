/* Update weights by a gradient that is complete. */
static void KERNEL(STATE *s, int at, const float *g, int n)
{
    for (int k = 0; k < n; k++)
        UPDATE(s, at + k, g[k]);
}
