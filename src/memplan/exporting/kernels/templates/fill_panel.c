/* Lay rows of b from one on, and WIDE or fewer of their columns, in a panel; the other factors are `step` apart. */
static void KERNEL(panel *to, const INPUT *b CONSTANTS, int deep, int count, int from, int step, const product *p)
{
    for (int k = 0; k < deep; k++) {
        to->at[k] = (from + k) * step;
        to->row[k] = to->columns + k * WIDE;
        for (int j = 0; j < WIDE; j++)
            to->columns[k * WIDE + j] = j < count ? VALUE(b[(from + k) * p->b_row + j * p->b_column], 0) : 0;
    }
    to->at[deep] = -1;
}
