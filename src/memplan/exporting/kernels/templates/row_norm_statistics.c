/* Mean and reciprocal deviation of each row. */
static void row_norm_statistics(float *mean, float *deviation, const float *x, float eps, int rows, int size)
{
    for (int r = 0; r < rows; r++, x += size) {
        float sum = 0, squares = 0;
        for (int k = 0; k < size; k++)
            sum += x[k];
        const float average = sum / (float)size;
        for (int k = 0; k < size; k++)
            squares += (x[k] - average) * (x[k] - average);
        mean[r] = average;
        deviation[r] = 1 / sqrtf(squares / (float)size + eps);
    }
}
