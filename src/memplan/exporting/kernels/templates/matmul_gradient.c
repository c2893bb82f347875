/* The gradient of a linear layer's weight, each element of which is handed on once it is complete: a product with few
   inner elements one after another, others in tiles. */
static void KERNEL(TARGET, const float *a, const INPUT *b CONSTANTS, const product *p)
{
    for (int i = 0; i < p->rows && p->inner < 4; i++, a += p->a_row)
        for (int j = 0; j < p->columns; j++) {
            const INPUT *column = b + j * p->b_column;
            float sum = a[0] * VALUE(column[0], 0);
            for (int k = 1; k < p->inner; k++)
                sum += a[k * p->a_column] * VALUE(column[k * p->b_row], 0);
            EMIT(i * p->columns + j, sum);
        }
    for (int first = 0; first < p->columns && p->inner >= 4; first += WIDE)
        for (int block = 0; block < p->rows; block += SHARING) {
            const int count = least(WIDE, p->columns - first), rows = least(SHARING, p->rows - block);
            float sums[SHARING * WIDE] = {0};
            panel columns;
            for (int begin = 0; begin < p->inner; begin += DEEP) {
                FILL(&columns, b + first * p->b_column, least(DEEP, p->inner - begin), count, begin, p->a_column, p);
                for (int i = 0; i < rows; i += 4)
                    tile(sums + i * WIDE, WIDE, a + (block + i) * p->a_row, p->a_row, rows - i, &columns);
            }
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < count; j++)
                    EMIT((block + i) * p->columns + first + j, sums[i * WIDE + j]);
        }
}
