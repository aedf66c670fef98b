// SPDX-License-Identifier: Apache-2.0
// Root-mean-square and layer norms of rows, each by one thread.

#include "norm.h"

namespace quire { namespace QUIRE_ISA { namespace {

// The variance is that of the centered row: a sum of squares less the square of the sum would cancel.
template <class T, class W>
inline void layer_norm_row(T* out, const T* x, const W* weight, const W* bias, int64_t n, float eps) {
    const float mean = reduce_row(x, n, [](Vec v, Vec total) { return total + v; }) / static_cast<float>(n);
    const float squares = reduce_row(x, n, [mean](Vec v, Vec total) { return fma(v - mean, v - mean, total); });
    const Vec scale = splat(1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps));
    for_each_vector(n, [&](int64_t i, auto lanes) {
        const Vec normed = (load(x + i, lanes) - mean) * scale * load(weight + i, lanes);
        store(out + i, bias ? normed + load(bias + i, lanes) : normed, lanes);
    });
}

template <class T>
inline void add_row(T* total, const T* x, const T* residual, int64_t n) {
    for_each_vector(n, [&](int64_t i, auto lanes) {
        store(total + i, load(x + i, lanes) + load(residual + i, lanes), lanes);
    });
}

// Calls body(T{}, W{}) with the element types of the rows and of the weight.
template <class Body>
inline int64_t with_dtypes(int64_t dtype, int64_t weight_dtype, Body body) {
    return with_dtype(dtype, [&](auto t) { return with_dtype(weight_dtype, [&](auto w) { return body(t, w); }); });
}

}  // namespace

int64_t rms_norm(void* out, const void* x, const void* weight, int64_t outer, int64_t inner, int64_t outer_stride,
                 int64_t inner_stride, int64_t n, float eps, int64_t dtype, int64_t weight_dtype) {
    return with_dtypes(dtype, weight_dtype, [&](auto t, auto w) {
        using T = decltype(t);
        using W = decltype(w);
        share(outer * inner, kElementWork * outer * inner * n, [=](int64_t row) {
            const int64_t start = row / inner * outer_stride + row % inner * inner_stride;
            norm_row(static_cast<T*>(out) + row * n, static_cast<const T*>(x) + start, static_cast<const W*>(weight),
                     n, eps);
        });
        return int64_t{0};
    });
}

int64_t fused_add_rms_norm(void* out, void* total, const void* x, const void* residual, const void* weight,
                           int64_t rows, int64_t n, float eps, int64_t dtype, int64_t weight_dtype) {
    return with_dtypes(dtype, weight_dtype, [&](auto t, auto w) {
        using T = decltype(t);
        using W = decltype(w);
        share(rows, kElementWork * rows * n, [=](int64_t row) {
            const int64_t at = row * n;
            add_row(static_cast<T*>(total) + at, static_cast<const T*>(x) + at, static_cast<const T*>(residual) + at, n);
            norm_row(static_cast<T*>(out) + at, static_cast<const T*>(total) + at, static_cast<const W*>(weight), n, eps);
        });
        return int64_t{0};
    });
}

int64_t fused_add_layer_norm(void* out, void* total, const void* x, const void* residual, const void* weight,
                             const void* bias, int64_t rows, int64_t n, float eps, int64_t dtype, int64_t weight_dtype) {
    return with_dtypes(dtype, weight_dtype, [&](auto t, auto w) {
        using T = decltype(t);
        using W = decltype(w);
        share(rows, kElementWork * rows * n, [=](int64_t row) {
            T* sums = static_cast<T*>(total) + row * n;
            add_row(sums, static_cast<const T*>(x) + row * n, static_cast<const T*>(residual) + row * n, n);
            layer_norm_row(static_cast<T*>(out) + row * n, sums, static_cast<const W*>(weight), static_cast<const W*>(bias), n,
                           eps);
        });
        return int64_t{0};
    });
}

int64_t layer_norm(void* out, const void* x, const void* weight, const void* bias, int64_t outer, int64_t inner,
                   int64_t outer_stride, int64_t inner_stride, int64_t n, float eps, int64_t dtype,
                   int64_t weight_dtype) {
    return with_dtypes(dtype, weight_dtype, [&](auto t, auto w) {
        using T = decltype(t);
        using W = decltype(w);
        share(outer * inner, kElementWork * outer * inner * n, [=](int64_t row) {
            const int64_t start = row / inner * outer_stride + row % inner * inner_stride;
            layer_norm_row(static_cast<T*>(out) + row * n, static_cast<const T*>(x) + start,
                           static_cast<const W*>(weight), static_cast<const W*>(bias), n, eps);
        });
        return int64_t{0};
    });
}

}}  // namespace quire::QUIRE_ISA
