/* A product over 2 ** shift, rounded half up, plus a zero, within bounds. Right shifts are those of unsigned numbers; of
   long shifts the upper word is enough. */
static int int8_rescaled(int64_t product, int shift, int zero, int low, int high)
{
    int64_t sum = zero;
    if (shift > 32) {
        const uint32_t lift = (uint32_t)1 << 31, half = (uint32_t)1 << (shift - 33);
        const uint32_t upper = (uint32_t)((uint64_t)product >> 32) + half + lift;
        const int32_t whole = (int32_t)(upper >> (shift - 32)) - (int32_t)(lift >> (shift - 32)) + zero;
        return whole < low ? low : whole > high ? high : (int)whole;
    } else {
        const uint64_t lift = (uint64_t)1 << 62, half = (uint64_t)1 << (shift - 1);
        sum += (int64_t)(((uint64_t)product + half + lift) >> shift) - (int64_t)(lift >> shift);
    }
    return sum < low ? low : sum > high ? high : (int)sum;
}
