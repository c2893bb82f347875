/* One element of a result: a and b are elements of the operands, p to s numbers. */

static float add(float a, float b, float p) { return a + p * b; }

static float subtract(float a, float b, float p) { return a - p * b; }

static float multiply(float a, float b) { return a * b; }

static float divide(float a, float b) { return a / b; }

static float larger(float a, float b) { return a > b || a != a ? a : b; }

static float smaller(float a, float b) { return a < b || a != a ? a : b; }

static float add_number(float a, float p, float q) { return a + p * q; }

static float subtract_number(float a, float p, float q) { return a - p * q; }

static float subtract_from(float a, float p, float q) { return p - q * a; }

static float scale(float a, float p) { return a * p; }

static float divide_number(float a, float p) { return a / p; }

static float copy(float a) { return a; }

static float negate(float a) { return -a; }

static float absolute(float a) { return fabsf(a); }

static float sign(float a) { return (float)((a > 0) - (a < 0)); }

static float square_root(float a) { return sqrtf(a); }

static float reciprocal_root(float a) { return 1 / sqrtf(a); }

static float reciprocal(float a) { return 1 / a; }

static float exponential(float a) { return expf(a); }

static float logarithm(float a) { return logf(a); }

static float logarithm_1p(float a) { return log1pf(a); }

static float sine(float a) { return sinf(a); }

static float cosine(float a) { return cosf(a); }

static float power(float a, float p) { return p == 2 ? a * a : p == 3 ? a * a * a : powf(a, p); }

static float relu(float a) { return a < 0 ? 0 : a; }

static float relu_gradient(float a, float b, float p) { return b <= p ? 0 : a; }

static float leaky_relu(float a, float p) { return a > 0 ? a : a * p; }

static float leaky_relu_gradient(float a, float b, float p) { return b > 0 ? a : a * p; }

static float clip(float a, float p, float q) { return a < p ? p : a > q ? q : a; }

static float clip_gradient(float a, float b, float p, float q) { return b <= p || b >= q ? 0 : a; }

static float sigmoid(float a) { return 1 / (1 + expf(-a)); }

static float sigmoid_gradient(float a, float b) { return a * (1 - b) * b; }

static float hyperbolic_tangent(float a) { return tanhf(a); }

static float hyperbolic_tangent_gradient(float a, float b) { return a * (1 - b * b); }

static float silu(float a) { return a / (1 + expf(-a)); }

static float silu_gradient(float a, float b)
{
    const float s = 1 / (1 + expf(-b));
    return a * s * (1 + b * (1 - s));
}

static float gelu(float a) { return a * 0.5f * (1 + erff(a * 0.70710678f)); }

static float gelu_gradient(float a, float b)
{
    return a * (0.5f * (1 + erff(b * 0.70710678f)) + b * 0.39894228f * expf(-0.5f * b * b));
}

static float gelu_tanh(float a) { return 0.5f * a * (1 + tanhf(0.79788456f * (a + 0.044715f * a * a * a))); }

static float gelu_tanh_gradient(float a, float b)
{
    const float t = tanhf(0.79788456f * (b + 0.044715f * b * b * b));
    return a * 0.5f * (1 + t + b * (1 - t * t) * 0.79788456f * (1 + 0.134145f * b * b));
}

static float hardswish(float a) { return a * clip_to_six(a + 3) / 6; }

static float hardswish_gradient(float a, float b) { return b <= -3 ? 0 : b < 3 ? a * (b / 3 + 0.5f) : a; }

static float clip_to_six(float a) { return a < 0 ? 0 : a > 6 ? 6 : a; }

static float hardsigmoid(float a) { return clip_to_six(a + 3) / 6; }

static float hardsigmoid_gradient(float a, float b) { return b > -3 && b < 3 ? a / 6 : 0; }

static float elu(float a, float p, float q, float r) { return a > 0 ? a * q : p * q * expm1f(a * r); }

static float elu_gradient(float a, float b, float p, float q, float r)
{
    return b > 0 ? a * q : a * p * q * r * expf(b * r);
}

static float elu_gradient_of_result(float a, float b, float p, float q, float r) { return b > 0 ? a * q : a * r * (b + p * q); }

static float softplus(float a, float p, float q) { return a * p > q ? a : log1pf(expf(a * p)) / p; }

static float softplus_gradient(float a, float b, float p, float q)
{
    return b * p > q ? a : a * expf(b * p) / (1 + expf(b * p));
}
