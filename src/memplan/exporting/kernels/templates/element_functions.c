/* One element of a result: a, b and c are elements of the operands, p to s numbers. */

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

static float equal(float a, float b) { return a == b; }

static float equal_number(float a, float p) { return a == p; }

static float different(float a, float b) { return a != b; }

static float different_number(float a, float p) { return a != p; }

static float less(float a, float b) { return a < b; }

static float less_number(float a, float p) { return a < p; }

static float at_most(float a, float b) { return a <= b; }

static float at_most_number(float a, float p) { return a <= p; }

static float more(float a, float b) { return a > b; }

static float more_number(float a, float p) { return a > p; }

static float at_least(float a, float b) { return a >= b; }

static float at_least_number(float a, float p) { return a >= p; }

static float is_zero(float a) { return a == 0; }

static float is_not_zero(float a) { return a != 0; }

static float both(float a, float b) { return a != 0 && b != 0; }

static float either(float a, float b) { return a != 0 || b != 0; }

static float choose(float a, float b, float c) { return a != 0 ? b : c; }

static float round_down(float a) { return floorf(a); }

static float round_up(float a) { return ceilf(a); }

static float round_to_zero(float a) { return truncf(a); }

static float error_function(float a) { return erff(a); }

static float exponential_less_1(float a) { return expm1f(a); }

static float hyperbolic_sine(float a) { return sinhf(a); }

static float hyperbolic_cosine(float a) { return coshf(a); }

static float angle(float a, float b) { return atan2f(a, b); }

static float is_nan(float a) { return a != a; }

static float is_infinite(float a) { return a - a != 0 && a == a; }

static float shrink_gradient(float a, float b, float p) { return b >= -p && b <= p ? 0 : a; }
