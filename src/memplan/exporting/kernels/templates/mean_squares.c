static void mean_squares(float *loss, const float *x, const float *y, float divisor, int n)
{
    float sum = 0;
    for (int k = 0; k < n; k++)
        sum += (x[k] - y[k]) * (x[k] - y[k]);
    *loss = sum / divisor;
}
