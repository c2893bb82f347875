static void KERNEL(float *y, OPERANDS, const strided *s PARAMETERS)
{
    for (int i = 0; i < s->size[0]; i++)
        for (int j = 0; j < s->size[1]; j++)
            for (int k = 0; k < s->size[2]; k++) {
                float *to = y + ROW(y);
                ROWS
                for (int l = 0; l < s->size[3]; l++)
                    to[l * s->y[3]] = VALUE;
            }
}
