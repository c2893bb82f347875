static void fill(float *y, float value, int n)
{
    for (int i = 0; i < n; i++)
        y[i] = value;
}
