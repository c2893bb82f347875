/* Each element of a product is complete before the next sixteen begin, and is handed on at once. */
static void KERNEL(TARGET, const float *a, const INPUT *b CONSTANTS, const product *p)
{
    for (int i = 0; i < p->rows; i++)
        for (int begin = 0; begin < p->columns; begin += 16) {
            float sums[16] = {0};
            int count = p->columns - begin < 16 ? p->columns - begin : 16;
            for (int k = 0; k < p->inner; k++) {
                float factor = a[i * p->a_row + k * p->a_column];
                const INPUT *row = b + k * p->b_row + begin * p->b_column;
                for (int j = 0; j < count; j++)
                    sums[j] += factor * VALUE(row[j * p->b_column], 0);
            }
            for (int j = 0; j < count; j++)
                EMIT(i * p->columns + begin + j, sums[j]);
        }
}
