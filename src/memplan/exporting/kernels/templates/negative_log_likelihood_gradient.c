static void negative_log_likelihood_gradient(float *x, const float *g, const int32_t *y, const float *weight,
                                             const float *total, int ignored, int mean, int outer, int classes, int inner)
{
    for (int k = 0; k < outer * classes * inner; k++)
        x[k] = 0;
    for (int k = 0; k < outer * inner; k++)
        if (y[k] != ignored && y[k] >= 0 && y[k] < classes)
            x[(k / inner * classes + y[k]) * inner + k % inner] = -*g * (weight ? weight[y[k]] : 1) / (mean ? *total : 1);
}
