/* A sum of products. What is outside of the plane is zero. */
static int32_t KERNEL(const INPUT *x, const signed char *weight, const int8_stage *c, int channel, int rows, int row,
                      int column)
{
    int32_t sum = 0;
    for (int i = channel; i < channel + c->narrow; i++) {
        const int zero = c->zeros ? (int)c->zeros[i] : c->zero;
        for (int ky = 0; ky < c->kernel_h; ky++) {
            const int r = row * c->stride_h - c->pad_h + ky * c->step_h, inside = r >= 0 && r < c->height;
            const INPUT *from = x + (i * rows + (inside ? r % rows : 0)) * c->width;
            int k = column * c->stride_w - c->pad_w;
            for (int kx = 0; kx < c->kernel_w; kx++, k += c->step_w)
                sum += (int32_t)*weight++ * (inside && k >= 0 && k < c->width ? (int)from[k] : zero);
        }
    }
    return sum;
}
