// SPDX-License-Identifier: Apache-2.0
// Real-gated linear recurrent units (S. De et al., 2024, arXiv:2402.19427): two gates of each channel, made of its head's
// channels, and a recurrence that each channel walks by itself.

#include "activations.h"
#include "lanes16.h"
#include "states.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kRowBlock = 64;                            // rows that share a job, and its slice of weights
constexpr int64_t kRows = kRegisters16 == 1 ? 8 : 4;         // rows that are multiplied together
constexpr int64_t kGateColumns = kRegisters16 == 1 ? 2 : 1;  // registers of sixteen columns, likewise
constexpr int64_t kChannels = 64;                            // of a walk

struct Units {
    const Float32 *x, *weights, *bias, *rates;
    Float32 *states, *out, *gates;
    int64_t heads, size, stride;

    int64_t width() const { return heads * size; }
    int64_t columns() const { return 2 * size; }  // of a head's gates: those of inputs, then those of decays
};

// Each output is a sum over the head's channels in their order, from its bias on.
template <int64_t rows, int64_t registers>
inline void multiply(const Units& units, int64_t row, int64_t head, int64_t column) {
    const int64_t size = units.size, columns = units.columns();
    const Float32* weights = units.weights + head * size * columns + column;
    const Float32* x = units.x + row * units.width() + head * size;
    Lanes16 sums[rows][registers];
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < registers; ++c) sums[r][c] = load16(units.bias + head * columns + column + 16 * c);
    for (int64_t k = 0; k < size; ++k) {
        for (int64_t c = 0; c < registers; ++c) {
            const Lanes16 weight = load16(weights + k * columns + 16 * c);
            for (int64_t r = 0; r < rows; ++r) {
                sums[r][c] = fma(splat16(x[r * units.width() + k].value), weight, sums[r][c]);
            }
        }
    }
    Float32* out = units.gates + (row * units.heads + head) * columns + column;
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < registers; ++c) store16(out + r * units.heads * columns + 16 * c, sums[r][c]);
}

template <int64_t registers>
inline void make_gates(const Units& units, int64_t begin, int64_t end, int64_t head, int64_t column) {
    int64_t row = begin;
    for (; row + kRows <= end; row += kRows) multiply<kRows, registers>(units, row, head, column);
    for (; row < end; ++row) multiply<1, registers>(units, row, head, column);
}

inline Vec root(Vec x) {
    for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
}

// Eight channels of a head over rows [first, last), from `state` on; the first token of a request enters as it is.
inline Vec walk(const Units& units, int64_t first, int64_t last, bool begins, int64_t head, int64_t channel, Vec state) {
    const Vec rate = load(units.rates + head * units.size + channel, All{});
    for (int64_t row = first; row < last; ++row) {
        const Float32* gates = units.gates + (row * units.heads + head) * units.columns() + channel;
        const int64_t at = row * units.width() + head * units.size + channel;
        const Vec input = sigmoid(load(gates, All{})) * load(units.x + at, All{});
        const Vec log_decay = rate * sigmoid(load(gates + units.size, All{}));
        state = begins && row == first ? input : fma(exp(log_decay), state, root(1.0f - exp(2.0f * log_decay)) * input);
        store(units.out + at, state, All{});
    }
    return state;
}

inline void walk_request(const Units& units, const StateBatch& batch, int64_t request, int64_t head, int64_t channel) {
    const int64_t left = units.size - channel, count = left < kChannels ? left : kChannels;
    for_each_piece(batch, request, [&](int64_t first, int64_t last, int64_t source, int64_t target) {
        for (int64_t i = channel; i < channel + count; i += kLanes) {
            const int64_t at = head * units.size + i;
            const Vec before = source ? load(units.states + source * units.stride + at, All{}) : Vec{};
            const Vec state = walk(units, first, last, !source, head, i, before);
            if (target) store(units.states + target * units.stride + at, state, All{});
        }
    });
}

}  // namespace

// Returns 1 + a request that does not fit, and nothing was done then; -1 for sizes that are not served.
int64_t rg_lru(void* out, const void* x, const void* weights, const void* bias, const void* rates, void* states, void* gates,
               const int32_t* starts, const int32_t* lengths, const int32_t* kept, const int32_t* tables, int64_t rows,
               int64_t requests, int64_t table_width, int64_t block_size, int64_t num_blocks, int64_t stride, int64_t heads,
               int64_t size) {
    if (size % kLanes) return -1;
    const StateBatch batch = {starts, lengths, kept, tables, rows, requests, table_width, block_size, num_blocks};
    if (const int64_t bad = find_bad_request(batch)) return bad;
    const Units units = {static_cast<const Float32*>(x), static_cast<const Float32*>(weights),
                         static_cast<const Float32*>(bias), static_cast<const Float32*>(rates),
                         static_cast<Float32*>(states), static_cast<Float32*>(out), static_cast<Float32*>(gates),
                         heads, size, stride};
    clear_rows_of_no_request(batch, out, units.width());
    const int64_t wide = 16 * kGateColumns, tiles = (units.columns() + wide - 1) / wide;
    const int64_t blocks = (rows + kRowBlock - 1) / kRowBlock;
    share(blocks * heads * tiles, rows * heads * size * units.columns(), [&](int64_t job) {
        const int64_t begin = job / (heads * tiles) * kRowBlock, head = job / tiles % heads, column = job % tiles * wide;
        const int64_t end = begin + kRowBlock < rows ? begin + kRowBlock : rows;
        if (column + wide <= units.columns()) {
            make_gates<kGateColumns>(units, begin, end, head, column);
        } else {
            make_gates<1>(units, begin, end, head, column);
        }
    });
    const int64_t slices = (size + kChannels - 1) / kChannels;
    share(requests * heads * slices, 8 * kElementWork * rows * units.width(), [&](int64_t job) {
        walk_request(units, batch, job / (heads * slices), job / slices % heads, job % slices * kChannels);
    });
    return 0;
}

}}  // namespace quire::QUIRE_ISA
