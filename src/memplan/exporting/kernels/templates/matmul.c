/* y[i, j] = bias[j] + sum of a[i, k] * b[k, j], of few rows or columns. y is contiguous. Where rows of b
   are contiguous, multiples of them are added; else rows of a meet columns of b. */
static void matmul(float *y, const float *a, const float *b, const float *bias, const product *p)
{
    for (int i = 0; i < p->rows; i++, y += p->columns) {
        const float *row = a + i * p->a_row;
        for (int j = 0; j < p->columns; j++)
            y[j] = bias ? bias[i * p->bias_row + j * p->bias_column] : 0;
        if (p->b_column == 1) {
            axpy_rows(y, row, p->a_column, b, p->b_row, p->inner, p->columns);
        } else if (p->b_row == 1 && p->a_column == 1) {
            for (int j = 0; j < p->columns; j++)
                y[j] += dot(row, b + j * p->b_column, p->inner);
        } else {
            for (int j = 0; j < p->columns; j++)
                for (int k = 0; k < p->inner; k++)
                    y[j] += row[k * p->a_column] * b[k * p->b_row + j * p->b_column];
        }
    }
}
