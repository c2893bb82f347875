/* Bytes as floats: so many planes, a channel each. */
static void KERNEL(float *y, const INPUT *x CONSTANTS, int planes, int channels, int size)
{
    for (int n = 0; n < planes; n++)
        for (int k = 0; k < size; k++)
            *y++ = VALUE(*x++, n % channels);
    (void)channels;
}
