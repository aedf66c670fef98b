// SPDX-License-Identifier: Apache-2.0
// What becomes of the hidden states of a text, token after token: sums, or the greatest numbers.
//
// Each number is one chain over the tokens in order, which continues where the step before left it, so no bit depends on the
// chunks of a text. Sums are of doubles.

#include "kernels.h"

namespace quire { namespace QUIRE_ISA { namespace {

typedef double Doubles __attribute__((vector_size(64)));

// By the codes that callers pass. Weights are positions, from 1 on.
enum Reduction : int64_t { kSum = 0, kWeightedSum = 1, kGreatest = 2 };

// The tokens of a request in this step: the row that keeps what is made of them, the first one's place in the step and its
// position in the text, and how many there are.
struct Chunk {
    int64_t row, first, start, count;

    Chunk(const int64_t* chunks, int64_t requests, int64_t r)
        : row(chunks[r]), first(chunks[requests + r]), start(chunks[2 * requests + r]), count(chunks[3 * requests + r]) {}
    bool fits(int64_t rows, int64_t tokens) const {
        return row >= 0 && row < rows && first >= 0 && start >= 0 && count > 0 && count <= tokens - first;
    }
};

inline Doubles widened(Vec v) { return __builtin_convertvector(v, Doubles); }

// Eight numbers of a vector, or the few that it ends with.
template <class T, class Lanes>
inline void add_tokens(double* vector, const T* x, int64_t stride, const Chunk& chunk, Lanes lanes, int64_t count,
                       bool weighted) {
    Doubles sums = {};
    const uint64_t bytes = static_cast<uint64_t>(count) * sizeof(double);
    if (chunk.start) __builtin_memcpy(&sums, vector, bytes);
    for (int64_t t = 0; t < chunk.count; ++t) {
        const Doubles value = widened(load(x + t * stride, lanes));
        sums = sums + (weighted ? value * static_cast<double>(chunk.start + t + 1) : value);
    }
    __builtin_memcpy(vector, &sums, bytes);
}

// NaN stays, so that the reader of the result sees it.
template <class T, class Lanes>
inline void keep_greatest(Float32* vector, const T* x, int64_t stride, const Chunk& chunk, Lanes lanes) {
    Vec top = chunk.start ? load(vector, lanes) : splat(-__builtin_inff());
    for (int64_t t = 0; t < chunk.count; ++t) {
        const Vec value = load(x + t * stride, lanes);
        top = ((top != top) | (value <= top)) ? top : value;
    }
    store(vector, top, lanes);
}

template <class T, class Lanes>
inline void reduce(void* vectors, const T* x, int64_t n, int64_t stride, const Chunk& chunk, int64_t reduction, int64_t column,
                   Lanes lanes, int64_t count) {
    const T* from = x + chunk.first * stride + column;
    const int64_t at = chunk.row * n + column;
    if (reduction == kGreatest) return keep_greatest(static_cast<Float32*>(vectors) + at, from, stride, chunk, lanes);
    add_tokens(static_cast<double*>(vectors) + at, from, stride, chunk, lanes, count, reduction == kWeightedSum);
}

}  // namespace

// Returns 1 + the number of a chunk that is none of the step's, in which case nothing is computed; or -1 for an unknown code.
int64_t accumulate(void* vectors, const void* x, const int64_t* chunks, int64_t requests, int64_t tokens, int64_t n,
                   int64_t stride, int64_t rows, int64_t reduction, int64_t dtype) {
    if (reduction < kSum || reduction > kGreatest) return -1;
    int64_t elements = 0;
    for (int64_t r = 0; r < requests; ++r) {
        const Chunk chunk(chunks, requests, r);
        if (!chunk.fits(rows, tokens)) return r + 1;
        elements += chunk.count * n;
    }
    return with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        const int64_t parts = (n + kLanes - 1) / kLanes;
        share(requests * parts, kElementWork * elements, [=](int64_t item) {
            const Chunk chunk(chunks, requests, item / parts);
            const int64_t column = item % parts * kLanes, left = n - column;
            const auto one = [&](auto lanes, int64_t count) {
                reduce(vectors, static_cast<const T*>(x), n, stride, chunk, reduction, column, lanes, count);
            };
            left < kLanes ? one(First{left}, left) : one(All{}, kLanes);
        });
        return int64_t{0};
    });
}

}}  // namespace quire::QUIRE_ISA
