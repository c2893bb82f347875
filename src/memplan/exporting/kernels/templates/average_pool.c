/* Elements that a window's sum is divided by: all of it, those of the padded plane, or a given number. */
static float divisor(const pool *p, int top, int left, int counts_padding, int given)
{
    int bottom = top + p->kernel_h, right = left + p->kernel_w;
    bottom = bottom < p->height + p->pad_h ? bottom : p->height + p->pad_h;
    right = right < p->width + p->pad_w ? right : p->width + p->pad_w;
    if (!counts_padding) {
        top = top < 0 ? 0 : top;
        left = left < 0 ? 0 : left;
        bottom = bottom < p->height ? bottom : p->height;
        right = right < p->width ? right : p->width;
    }
    return given ? (float)given : (float)((bottom - top) * (right - left));
}
