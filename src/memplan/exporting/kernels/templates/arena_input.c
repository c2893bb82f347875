/* The caller's input at its place in the arena, where it mostly lies already. */
static void arena_input(void *to, const void *from, int size)
{
    unsigned char *t = (unsigned char *)to;
    const unsigned char *f = (const unsigned char *)from;
    if (t < f)
        for (int k = 0; k < size; k++)
            t[k] = f[k];
    if (t > f)
        for (int k = size; k-- > 0;)
            t[k] = f[k];
}
