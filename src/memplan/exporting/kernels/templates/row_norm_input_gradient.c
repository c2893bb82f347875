/* y may be g or x. */
static void row_norm_input_gradient(float *y, const float *g, const float *x, const float *weight, const float *mean,
                                    const float *deviation, int rows, int size, int inner, int weights)
{
    for (int r = 0; r < rows; r++, g += size, x += size, y += size) {
        float sum = 0, products = 0;
        for (int k = 0; k < size; k++) {
            const float one = g[k] * (weight ? weight[(r * (size / inner) + k / inner) % weights] : 1);
            sum += one;
            products += one * (x[k] - mean[r]);
        }
        const float shift = sum / (float)size, slope = products * deviation[r] * deviation[r] / (float)size;
        for (int k = 0; k < size; k++) {
            const float one = g[k] * (weight ? weight[(r * (size / inner) + k / inner) % weights] : 1);
            y[k] = (one - shift - (x[k] - mean[r]) * slope) * deviation[r];
        }
    }
}
