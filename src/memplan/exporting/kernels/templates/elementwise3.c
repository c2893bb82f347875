/* Each triple of elements by itself; y may be a, b or c. */
static void KERNEL(float *y, const float *a, const float *b, const float *c, int n PARAMETERS)
{
    for (int i = 0; i < n; i++)
        y[i] = RESULT(a[i], b[i], c[i]);
}
