/* A function of each element, by table. */
static void int8_lookup(signed char *y, const signed char *x, const signed char *table, int n)
{
    for (int k = 0; k < n; k++)
        y[k] = table[x[k] + 128];
}
