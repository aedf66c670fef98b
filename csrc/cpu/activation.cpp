// Activations, plain and gated. Elements are independent, so any split over threads gives the same bits.

#include "kernels.h"

namespace quire { namespace QUIRE_ISA { namespace {

// A long row is cut, so that one token of a wide MLP can use every thread; a multiple of the vector length.
constexpr int64_t kTile = 4096;

// x * (1 + tanh(u)) / 2 is x * sigmoid(2 u) (Hendrycks and Gimpel, 2016, arXiv:1606.08415).
inline Vec gelu_tanh(Vec x) {
    const Vec u = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (exp(-2.0f * u) + 1.0f);
}

// x * P(N <= x), with the upper tail of the normal distribution from Abramowitz and Stegun, 7.1.26 (error below 8e-8).
inline Vec gelu(Vec x) {
    const Vec z = (x < 0.0f ? -x : x) * 0.7071067812f, t = 1.0f / (0.3275911f * z + 1.0f);
    constexpr float coefficients[] = {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
    Vec series = splat(1.061405429f);
    for (float coefficient : coefficients) series = fma(series, t, splat(coefficient));
    const Vec tail = 0.5f * series * t * exp(-(z * z));
    return x < 0.0f ? x * tail : x * (1.0f - tail);
}

inline Vec relu(Vec x) { return x < 0.0f ? Vec{} : x; }

inline Vec sigmoid(Vec x) { return 1.0f / (exp(-x) + 1.0f); }

// What `activate` computes, by the codes that callers pass.
enum Function : int64_t { kRelu = 0, kSilu = 1, kGelu = 2, kGeluTanh = 3, kSigmoid = 4, kTanh = 5 };

template <class Activation>
inline int64_t activate_all(void* out, const void* x, int64_t size, int64_t dtype, Activation activation) {
    return with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        share((size + kTile - 1) / kTile, kElementWork * size, [=](int64_t tile) {
            const int64_t start = tile * kTile;
            const T* from = static_cast<const T*>(x) + start;
            T* to = static_cast<T*>(out) + start;
            for_each_vector(size - start < kTile ? size - start : kTile,
                            [&](int64_t i, auto lanes) { store(to + i, activation(load(from + i, lanes)), lanes); });
        });
        return int64_t{0};
    });
}

// activation(first half) * second half of each row.
template <class Activation>
inline int64_t activate_and_mul(void* out, const void* x, int64_t rows, int64_t n, int64_t dtype, Activation activation) {
    return with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        const int64_t tiles = (n + kTile - 1) / kTile;
        share(rows * tiles, kElementWork * rows * n, [=](int64_t item) {
            const int64_t row = item / tiles, start = item % tiles * kTile;
            const T* gate = static_cast<const T*>(x) + row * 2 * n + start;
            T* to = static_cast<T*>(out) + row * n + start;
            for_each_vector(n - start < kTile ? n - start : kTile, [&](int64_t i, auto lanes) {
                store(to + i, activation(load(gate + i, lanes)) * load(gate + n + i, lanes), lanes);
            });
        });
        return int64_t{0};
    });
}

}  // namespace

int64_t activate(void* out, const void* x, int64_t size, int64_t function, int64_t dtype) {
    switch (function) {
        case kRelu: return activate_all(out, x, size, dtype, [](Vec v) { return relu(v); });
        case kSilu: return activate_all(out, x, size, dtype, [](Vec v) { return silu(v); });
        case kGelu: return activate_all(out, x, size, dtype, [](Vec v) { return gelu(v); });
        case kGeluTanh: return activate_all(out, x, size, dtype, [](Vec v) { return gelu_tanh(v); });
        case kSigmoid: return activate_all(out, x, size, dtype, [](Vec v) { return sigmoid(v); });
        case kTanh: return activate_all(out, x, size, dtype, [](Vec v) { return tanh(v); });
        default: return -1;
    }
}

int64_t silu_and_mul(void* out, const void* x, int64_t rows, int64_t n, int64_t dtype) {
    return activate_and_mul(out, x, rows, n, dtype, [](Vec v) { return silu(v); });
}

int64_t gelu_and_mul(void* out, const void* x, int64_t rows, int64_t n, int64_t use_tanh, int64_t dtype) {
    if (use_tanh) return activate_and_mul(out, x, rows, n, dtype, [](Vec v) { return gelu_tanh(v); });
    return activate_and_mul(out, x, rows, n, dtype, [](Vec v) { return gelu(v); });
}

}}  // namespace quire::QUIRE_ISA
