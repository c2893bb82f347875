/* Set all elements. */
static void fill(float *y, float value, int n)
{
    for (; n >= 4; n -= 4, y += 4)
        y[0] = y[1] = y[2] = y[3] = value;
    while (n-- > 0)
        *y++ = value;
}
