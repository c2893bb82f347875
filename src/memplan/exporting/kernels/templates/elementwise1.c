/* Each element by itself; y may be a. */
static void KERNEL(float *y, const float *a, int n PARAMETERS)
{
    for (int i = 0; i < n; i++)
        y[i] = RESULT(a[i]);
}
