static void KERNEL(float *x, const float *g, const INDEX *y, const float *weight, const float *total, int ignored,
                   int reduced, int outer, int classes, int inner)
{
    for (int k = 0; k < outer * classes * inner; k++)
        x[k] = 0;
    for (int k = 0; k < outer * inner; k++) {
        const int label = (int)y[k];
        if (label != ignored && label >= 0 && label < classes)
            x[(k / inner * classes + label) * inner + k % inner]
                = -g[reduced ? 0 : k] * (weight ? weight[label] : 1) / (reduced == 1 ? *total : 1);
    }
}
