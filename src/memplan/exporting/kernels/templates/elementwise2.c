/* Each pair of elements by itself; y may be a or b. */
static void KERNEL(float *y, const float *a, const float *b, int n PARAMETERS)
{
    for (int i = 0; i < n; i++)
        y[i] = RESULT(a[i], b[i]);
}
