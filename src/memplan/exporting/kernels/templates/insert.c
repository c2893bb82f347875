/* y is what was there before, but for a part; y may be the same memory. */
static void insert(float *y, const float *before, const float *part, int size, int start, int count)
{
    for (int k = 0; k < size; k++)
        if (k >= start && k < start + count)
            y[k] = part[k - start];
        else if (y != before)
            y[k] = before ? before[k] : 0;
}
