/* Update weights by a gradient that is complete. */
static void KERNEL(TARGET, const float *g, int n)
{
    for (int k = 0; k < n; k++)
        EMIT(k, g[k]);
}
