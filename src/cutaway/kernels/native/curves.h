// Functions of single numbers, as many at a time as a register holds.
#pragma once
#include "simd.h"

namespace cutaway {

// e^x to about one unit in the last place: x = n ln 2 + r, and a polynomial for e^r (Cephes' expf).
inline Vec exponential(Vec x) {
    x = larger(all(-87.3f), smaller(all(88.0f), x));  // of these two the second is kept where it is no number
    const Vec n = nearest(mul(x, all(1.44269504f)));
    Vec r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    Vec p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), all(1.0f));
    return mul(p, power_of_two(n));
}

// With e^(−2|x|), so that nothing overflows.
inline Vec hyperbolic_tangent(Vec x) {
    const Vec e = exponential(mul(size_of(x), all(-2.0f)));
    const Vec large = divide(sub(all(1.0f), e), add(all(1.0f), e));
    // Near zero the difference loses digits; there the series has them.
    const Vec s = mul(x, x);
    Vec series = fma(s, all(-17.0f / 315), all(2.0f / 15));
    series = fma(series, s, all(-1.0f / 3));
    series = fma(mul(series, s), x, x);
    return where_less(s, all(0.01f), series, with_sign_of(large, x));
}

// The error function as a quotient of polynomials on [−4, 4], where it is ±1 in fp32 (Eigen's coefficients).
inline Vec error_function(Vec x) {
    x = larger(all(-4.0f), smaller(all(4.0f), x));
    const Vec s = mul(x, x);
    Vec top = all(-2.72614225801306e-10f);
    top = fma(top, s, all(2.77068142495902e-08f));
    top = fma(top, s, all(-2.10102402082508e-06f));
    top = fma(top, s, all(-5.69250639462346e-05f));
    top = fma(top, s, all(-7.34990630326855e-04f));
    top = fma(top, s, all(-2.95459980854025e-03f));
    top = fma(top, s, all(-1.60960333262415e-02f));
    Vec bottom = all(-1.45660718464996e-05f);
    bottom = fma(bottom, s, all(-2.13374055278905e-04f));
    bottom = fma(bottom, s, all(-1.68282697438203e-03f));
    bottom = fma(bottom, s, all(-7.37332916720468e-03f));
    bottom = fma(bottom, s, all(-1.42647390514189e-02f));
    return divide(mul(x, top), bottom);
}

enum Curve : int32_t { RELU, RELU2, GELU, GELU_TANH, SILU, TANH };

inline Vec curved(int32_t curve, Vec x) {
    switch (curve) {
        case RELU: return larger(zero(), x);
        case RELU2: return mul(larger(zero(), x), larger(zero(), x));
        case GELU: return mul(mul(x, all(0.5f)), add(all(1.0f), error_function(mul(x, all(0.70710678f)))));
        case GELU_TANH: {
            const Vec inner = mul(all(0.79788456f), fma(mul(mul(x, x), x), all(0.044715f), x));
            return mul(mul(x, all(0.5f)), add(all(1.0f), hyperbolic_tangent(inner)));
        }
        case SILU: return divide(x, add(all(1.0f), exponential(sub(zero(), x))));
        default: return hyperbolic_tangent(x);
    }
}

}  // namespace cutaway
