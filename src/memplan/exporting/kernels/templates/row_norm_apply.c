/* Every `inner` elements share a weight; weights go on from row to row, and begin anew after the last. */
static void row_norm_apply(float *y, const float *x, const float *weight, const float *bias, const float *mean,
                           const float *deviation, int rows, int size, int inner, int weights)
{
    for (int r = 0; r < rows; r++, x += size, y += size)
        for (int k = 0; k < size; k++) {
            const int at = (r * (size / inner) + k / inner) % weights;
            y[k] = (x[k] - mean[r]) * deviation[r] * (weight ? weight[at] : 1) + (bias ? bias[at] : 0);
        }
}
