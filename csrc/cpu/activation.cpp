// Gated activations. Elements are independent, so any split over threads gives the same bits.

#include "kernels.h"

namespace quire { namespace QUIRE_ISA { namespace {

// A long row is cut, so that one token of a wide MLP can use every thread; a multiple of the vector length.
constexpr int64_t kTile = 4096;

template <class T>
inline void silu_and_mul_tile(T* out, const T* gate, const T* up, int64_t n) {
    for_each_vector(n, [&](int64_t i, auto lanes) {
        store(out + i, silu(load(gate + i, lanes)) * load(up + i, lanes), lanes);
    });
}

}  // namespace

int64_t silu_and_mul(void* out, const void* x, int64_t rows, int64_t n, int64_t dtype) {
    return with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        const int64_t tiles = (n + kTile - 1) / kTile;
#pragma omp parallel for schedule(static) if (rows * n >= kParallelElements)
        for (int64_t item = 0; item < rows * tiles; ++item) {
            const int64_t row = item / tiles, start = item % tiles * kTile;
            const T* gate = static_cast<const T*>(x) + row * 2 * n + start;
            const int64_t count = n - start < kTile ? n - start : kTile;
            silu_and_mul_tile(static_cast<T*>(out) + row * n + start, gate, gate + n, count);
        }
        return int64_t{0};
    });
}

}}  // namespace quire::QUIRE_ISA
