// SPDX-License-Identifier: Apache-2.0
// Activations, plain and gated. Elements are independent, so any split over threads gives the same bits.

#include "activations.h"

namespace quire { namespace QUIRE_ISA { namespace {

// A long row is cut, so that one token of a wide MLP can use every thread; a multiple of the vector length.
constexpr int64_t kTile = 4096;

template <class Function>
inline int64_t activate_all(void* out, const void* x, int64_t size, int64_t dtype, Function function) {
    return with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        share((size + kTile - 1) / kTile, kElementWork * size, [=](int64_t tile) {
            const int64_t start = tile * kTile;
            const T* from = static_cast<const T*>(x) + start;
            T* to = static_cast<T*>(out) + start;
            for_each_vector(size - start < kTile ? size - start : kTile,
                            [&](int64_t i, auto lanes) { store(to + i, function(load(from + i, lanes)), lanes); });
        });
        return int64_t{0};
    });
}

// function(first half) * second half of each row.
template <class Function>
inline int64_t activate_and_mul(void* out, const void* x, int64_t rows, int64_t n, int64_t dtype, Function function) {
    return with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        const int64_t tiles = (n + kTile - 1) / kTile;
        share(rows * tiles, kElementWork * rows * n, [=](int64_t item) {
            const int64_t row = item / tiles, start = item % tiles * kTile;
            const T* gate = static_cast<const T*>(x) + row * 2 * n + start;
            T* to = static_cast<T*>(out) + row * n + start;
            for_each_vector(n - start < kTile ? n - start : kTile, [&](int64_t i, auto lanes) {
                store(to + i, function(load(gate + i, lanes)) * load(gate + n + i, lanes), lanes);
            });
        });
        return int64_t{0};
    });
}

}  // namespace

// Returns -1 for an unknown activation or element type.
int64_t activate(void* out, const void* x, int64_t size, int64_t activation, int64_t dtype) {
    return with_function(activation, [=](auto function) { return activate_all(out, x, size, dtype, function); });
}

int64_t silu_and_mul(void* out, const void* x, int64_t rows, int64_t n, int64_t dtype) {
    return activate_and_mul(out, x, rows, n, dtype, [](Vec v) { return silu(v); });
}

int64_t gelu_and_mul(void* out, const void* x, int64_t rows, int64_t n, int64_t use_tanh, int64_t dtype) {
    if (use_tanh) return activate_and_mul(out, x, rows, n, dtype, [](Vec v) { return gelu_tanh(v); });
    return activate_and_mul(out, x, rows, n, dtype, [](Vec v) { return gelu(v); });
}

}}  // namespace quire::QUIRE_ISA
