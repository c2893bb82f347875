static void KERNEL(float *y, const float *a, const float *b, const float *c, const strided *s PARAMETERS)
{
    for (int i = 0; i < s->size[0]; i++)
        for (int j = 0; j < s->size[1]; j++)
            for (int k = 0; k < s->size[2]; k++) {
                float *to = y + i * s->y[0] + j * s->y[1] + k * s->y[2];
                const float *one = a + i * s->a[0] + j * s->a[1] + k * s->a[2];
                const float *two = b + i * s->b[0] + j * s->b[1] + k * s->b[2];
                const float *three = c + i * s->c[0] + j * s->c[1] + k * s->c[2];
                for (int l = 0; l < s->size[3]; l++)
                    to[l * s->y[3]] = RESULT(one[l * s->a[3]], two[l * s->b[3]], three[l * s->c[3]]);
            }
}
