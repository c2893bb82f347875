/* Mean and reciprocal deviation of each row. */
static void row_norm_statistics(float *mean, float *deviation, const float *x, float eps, int rows, int size)
{
    for (int r = 0; r < rows; r++, x += size) {
        mean[r] = sum_of(x, size) / (float)size;
        deviation[r] = 1 / sqrtf(moment(x, mean[r], x, mean[r], size) / (float)size + eps);
    }
}
