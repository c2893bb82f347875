/* The same in tiles, of y with any steps: rows of a meet panels of columns of b. */
static void matmul_tiles(float *y, const float *a, const float *b, const float *bias, const product *p, int y_row,
                         int y_column)
{
    for (int first = 0; first < p->columns; first += WIDE) {
        const int count = least(WIDE, p->columns - first);
        for (int i = 0; i < p->rows; i++)
            for (int j = first; j < first + count; j++)
                y[i * y_row + j * y_column] = bias ? bias[i * p->bias_row + j * p->bias_column] : 0;
        for (int begin = 0; begin < p->inner; begin += DEEP) {
            panel columns;
            fill_panel(&columns, b + first * p->b_column, least(DEEP, p->inner - begin), count, begin, p->a_column, p);
            for (int i = 0; i < p->rows; i += 4) {
                float sums[4 * WIDE] = {0};
                tile(sums, WIDE, a + i * p->a_row, p->a_row, p->rows - i, &columns);
                for (int r = i; r < least(i + 4, p->rows); r++)
                    for (int j = 0; j < count; j++)
                        y[r * y_row + (first + j) * y_column] += sums[(r - i) * WIDE + j];
            }
        }
    }
}
