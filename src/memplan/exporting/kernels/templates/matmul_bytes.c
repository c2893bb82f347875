/* The same with a in eight bits. */
static void KERNEL(float *y, const INPUT *a CONSTANTS, const float *b, const float *bias, const product *p)
{
    for (int i = 0; i < p->rows; i++, y += p->columns) {
        for (int j = 0; j < p->columns; j++)
            y[j] = bias ? bias[i * p->bias_row + j * p->bias_column] : 0;
        for (int k = 0; k < p->inner; k++) {
            const float factor = VALUE(a[i * p->a_row + k * p->a_column], 0);
            for (int j = 0; j < p->columns; j++)
                y[j] += factor * b[k * p->b_row + j * p->b_column];
        }
    }
}
