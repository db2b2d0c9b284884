// What is done to single vectors: norms, and turns by position.
#pragma once
#include <cmath>

#include "simd.h"

namespace cutaway {

struct Norm {
    const float* weight;
    const float* bias;
    float eps, offset;
    int64_t kind;  // 0 none, 1 LayerNorm, 2 RMSNorm
};

inline void normed(const Norm& norm, const float* x, float* y, int64_t width) {
    if (norm.kind == 0) {
        if (x != y) std::memcpy(y, x, static_cast<size_t>(width) * sizeof(float));
        return;
    }
    const int64_t whole = width / LANES * LANES;
    float m = 0;
    if (norm.kind == 1) {
        Doubles low = lower(zero()), high = low;
        for (int64_t d = 0; d < whole; d += LANES) {
            const Vec v = load(x + d);
            low = add(low, lower(v));
            high = add(high, upper(v));
        }
        double sum = total(add(low, high));
        for (int64_t d = whole; d < width; d++) sum += x[d];
        m = static_cast<float>(sum / static_cast<double>(width));
    }
    Doubles low = lower(zero()), high = low;
    for (int64_t d = 0; d < whole; d += LANES) {
        const Vec v = sub(load(x + d), all(m));
        low = fma(lower(v), lower(v), low);
        high = fma(upper(v), upper(v), high);
    }
    double square = total(add(low, high));
    for (int64_t d = whole; d < width; d++) square += static_cast<double>(x[d] - m) * static_cast<double>(x[d] - m);
    const float scale = 1.0f / std::sqrt(static_cast<float>(square / static_cast<double>(width)) + norm.eps);
    for (int64_t d = 0; d < whole; d += LANES) {
        const Vec z = mul(mul(sub(load(x + d), all(m)), all(scale)), add(load(norm.weight + d), all(norm.offset)));
        store(y + d, norm.bias ? add(z, load(norm.bias + d)) : z);
    }
    for (int64_t d = whole; d < width; d++) {
        const float z = (x[d] - m) * scale * (norm.weight[d] + norm.offset);
        y[d] = norm.bias ? z + norm.bias[d] : z;
    }
}

inline void turned(float* x, const float* cos, const float* sin, int64_t pairs, bool interleaved) {
    for (int64_t i = 0; i < pairs; i++) {
        float& first = interleaved ? x[2 * i] : x[i];
        float& second = interleaved ? x[2 * i + 1] : x[i + pairs];
        const float a = first, b = second;
        first = a * cos[i] - b * sin[i];
        second = b * cos[i] + a * sin[i];
    }
}

}  // namespace cutaway
