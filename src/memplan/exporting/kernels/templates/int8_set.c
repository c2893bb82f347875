/* The nearest of the weights in eight bits. What is not a number changes nothing. */
static void int8_set(const float *from, signed char *w, const float *scale, int n, int row)
{
    for (int k = 0; k < n; k++) {
        const float real = from[k] / scale[k / row];
        if (real != real)
            continue;
        w[k] = (signed char)(real > 127 ? 127 : real > -127 ? real < 0 ? real - 0.5f : real + 0.5f : -127);
    }
}
