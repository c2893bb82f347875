/* Rows of gates, of which `row` elements begin at y, get the products of a state with rows of w. */
static void add_state(float *y, int row, const float *h, const float *w, const float *bias, int batch, int count, int hidden)
{
    for (int n = 0; n < batch; n++, y += row, h += hidden)
        for (int k = 0; k < count; k++)
            y[k] += (bias ? bias[k] : 0) + dot(h, w + k * hidden, hidden);
}

/* The other way: a state's gradient gets multiples of the rows of w. */
static void add_gates(float *h, const float *g, int row, const float *w, int batch, int count, int hidden)
{
    for (int n = 0; n < batch; n++, g += row, h += hidden)
        for (int k = 0; k < count; k++)
            axpy(h, w + k * hidden, g[k], hidden);
}
