/* The same with b in eight bits: each column has its own scale, or each row of it. */
static void matmul_int8(float *y, const float *a, const signed char *b, const float *scale, int by_column,
                        const float *bias, const product *p)
{
    for (int i = 0; i < p->rows; i++, y += p->columns) {
        const float *row = a + i * p->a_row;
        for (int j = 0; j < p->columns; j++)
            y[j] = bias ? bias[i * p->bias_row + j * p->bias_column] : 0;
        for (int j = 0; by_column && j < p->columns; j++) {
            float sum = 0;
            for (int k = 0; k < p->inner; k++)
                sum += row[k * p->a_column] * (float)b[k * p->b_row + j * p->b_column];
            y[j] += scale[j] * sum;
        }
        for (int k = 0; !by_column && k < p->inner; k++) {
            const float factor = row[k * p->a_column] * scale[k];
            for (int j = 0; j < p->columns; j++)
                y[j] += factor * (float)b[k * p->b_row + j * p->b_column];
        }
    }
}
