// SPDX-License-Identifier: Apache-2.0
// The products of attention: rows of queries by keys, rows of weights by values.
//
// Sixteen columns of a few rows are summed in registers while k goes on in order; how many rows and columns are taken
// together changes no bit. The right side is converted to float32 on its way from memory, or from a copy that was. Blocks lie
// anywhere, so the processor cannot foresee the next one: it is asked for while this one is multiplied.

#pragma once

#include <type_traits>

#include "attention_read.h"
#include "lanes16.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Rows whose sums with a piece fit the registers, and sums that do.
#ifdef __AVX512F__
constexpr int kMaxRows = 12, kMaxSums = 24;
#elif defined(QUIRE_PLAIN)
constexpr int kMaxRows = 2, kMaxSums = 2;
#else
constexpr int kMaxRows = 6, kMaxSums = 6;
#endif

#if defined(__AVX512F__) || defined(QUIRE_NEON)
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorRegisters = 16;
#endif

// Pieces that R rows take together: many sums under way hide how long each addition takes.
template <int R>
constexpr int kPieces = 4 * R <= kMaxSums ? 4 : 2 * R <= kMaxSums ? 2 : 1;

// Whether the columns of N pieces, once converted, have registers beside the sums of R rows and a row's value; a sum that had
// none would wait for memory with every k.
template <int R, int N, class B>
constexpr bool kHoldsColumns = std::is_same_v<B, Float32> || kRegisters16 * (R * N + N) < kVectorRegisters;

// The sums of R rows and N pieces.
template <int R, int N>
struct Sums {
    Lanes16 at[R][N];

    void clear() {
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) at[r][n] = splat16(0.0f);
    }
    // c [R][stride], each row times its factor.
    void start(const Float32* c, int64_t stride, const float* factors) {
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) at[r][n] = load16(c + r * stride + n * kPiece) * splat16(factors[r]);
    }
    void finish(Float32* c, int64_t stride) const {
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) store16(c + r * stride + n * kPiece, at[r][n]);
    }
    // Adds a(r, k) * b[n][k * stride ...] for k < depth, and asks memory for what lies at ahead[n][k * step].
    template <class A, class B>
    void add(A a, const B* const (&b)[N], int64_t stride, int64_t depth, const B* const (&ahead)[N], int64_t step) {
        for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) __builtin_prefetch(ahead[n] + k * step, 0, 2);
            if constexpr (kHoldsColumns<R, N, B>) {
                Lanes16 columns[N];
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) columns[n] = load16(b[n] + k * stride);
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    const Lanes16 value = splat16(a(r, k));
#pragma GCC unroll 4
                    for (int n = 0; n < N; ++n) at[r][n] = fma(value, columns[n], at[r][n]);
                }
            } else {
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) {
                    const Lanes16 column = load16(b[n] + k * stride);
#pragma GCC unroll 12
                    for (int r = 0; r < R; ++r) at[r][n] = fma(splat16(a(r, k)), column, at[r][n]);
                    asm volatile("" ::: "memory");  // or the compiler keeps the rows' values, for which there is no room
                }
            }
        }
    }
};

// Calls body(integral constant R) for 1 <= rows <= kMaxRows.
template <int R = kMaxRows, class Body>
inline void with_row_count(int64_t rows, Body body) {
    if constexpr (R == 1) body(std::integral_constant<int, 1>{});
    else if (rows == R) body(std::integral_constant<int, R>{});
    else with_row_count<R - 1>(rows, body);
}

inline int64_t row_blocks(int64_t rows) { return (rows + kMaxRows - 1) / kMaxRows; }
inline int64_t block_row(int64_t rows, int64_t block) { return rows * block / row_blocks(rows); }

// Calls body(integral constant R, first row) for rows in blocks of nearly equal size.
template <class Body>
inline void for_each_row_block(int64_t rows, Body body) {
    for (int64_t block = 0; block < row_blocks(rows); ++block) {
        const int64_t row = block_row(rows, block);
        with_row_count(block_row(rows, block + 1) - row, [&](auto count) { body(count, row); });
    }
}

// Calls body(integral constant N, first piece) for pieces [first, end), as many at once as R rows allow.
template <int R, class Body>
inline void for_each_pieces(int64_t first, int64_t end, Body body) {
    constexpr int N = kPieces<R>;
    for (; first + N <= end; first += N) body(std::integral_constant<int, N>{}, first);
    for (; N > 1 && first < end; ++first) body(std::integral_constant<int, 1>{}, first);
}

}}}  // namespace quire::QUIRE_ISA
