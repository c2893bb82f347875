/* Each element by itself; y may be an operand. */
static void KERNEL(float *y, OPERANDS, int n PARAMETERS)
{
    for (int i = 0; i < n; i++)
        y[i] = VALUE;
}
