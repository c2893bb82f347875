/* A product over 2 ** shift, rounded half up, plus a zero, within bounds. The right shift is one of unsigned numbers. */
static int int8_rescaled(int64_t product, int shift, int zero, int low, int high)
{
    const uint64_t lift = (uint64_t)1 << 62, half = (uint64_t)1 << (shift - 1);
    const int64_t sum = (int64_t)(((uint64_t)product + half + lift) >> shift) - (int64_t)(lift >> shift) + zero;
    return sum < low ? low : sum > high ? high : (int)sum;
}
