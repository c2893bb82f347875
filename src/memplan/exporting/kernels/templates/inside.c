/* First position whose partner, stride * position + offset, is not before 0. */
static int first_inside(int offset, int stride)
{
    return offset >= 0 ? 0 : (stride - 1 - offset) / stride;
}

/* End of the positions whose partner is before the size. */
static int end_inside(int offset, int stride, int size, int count)
{
    int end = size <= offset ? 0 : (size - 1 - offset) / stride + 1;
    return end < count ? end : count;
}
