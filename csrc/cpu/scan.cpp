// SPDX-License-Identifier: Apache-2.0
// Layers that keep a state: a convolution over the last inputs of each channel, and the recurrences of Mamba and Mamba 2.
//
// An item is a request and some channels, or a head, whose state it walks through row after row. Each state is computed from
// the one before in the same way wherever a step begins or ends, so neither chunk, batch nor thread changes a bit.

#include <cstddef>

#include "activations.h"
#include "lanes16.h"
#include "states.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kSlice = 32;        // channels of an item
constexpr int64_t kWideSlice = 128;   // of one that keeps little of each
constexpr int64_t kMostStates = 256;  // of a channel of Mamba
constexpr int64_t kMostOfHead = 65536;  // floats that a head of Mamba 2 keeps
constexpr int64_t kExpWork = 16;

// Rows of floats, of which each begins `stride` behind the one before.
struct Rows {
    const Float32* data;
    int64_t stride;

    const Float32* at(int64_t row, int64_t column) const { return data + row * stride + column; }
};

inline Rows rows_of(const void* data, int64_t stride) { return {static_cast<const Float32*>(data), stride}; }

// Calls body(request, begin, count) for pieces of [0, size) of `most` at most, on some thread, for each request.
template <int64_t most, class Body>
inline void share_slices(const StateBatch& batch, int64_t size, int64_t work, Body body) {
    const int64_t slices = (size + most - 1) / most;
    share(batch.requests * slices, work, [=](int64_t item) {
        const int64_t begin = item % slices * most, left = size - begin;
        body(item / slices, begin, left < most ? left : most);
    });
}

// How columns are taken: many at a time, or the last few.
struct Sixteen {
    using Value = Lanes16;
    Value load(const Float32* p) const { return load16(p); }
    void store(Float32* p, Value v) const { store16(p, v); }
    static Value splat(float x) { return splat16(x); }
    static Value silu(Value v) {
        return by_vectors([](auto x, auto) { return quire::QUIRE_ISA::silu(x); }, v, v);
    }
};

template <class Lanes>
struct Eight {
    using Value = Vec;
    Lanes lanes;
    Value load(const Float32* p) const { return quire::QUIRE_ISA::load(p, lanes); }
    void store(Float32* p, Value v) const { quire::QUIRE_ISA::store(p, v, lanes); }
    static Value splat(float x) { return quire::QUIRE_ISA::splat(x); }
    static Value silu(Value v) { return quire::QUIRE_ISA::silu(v); }
};

// Calls body(column, lanes) for all of [0, size).
template <class Body>
inline void for_each_columns(int64_t size, Body body) {
    int64_t column = 0;
    for (; column + 16 <= size; column += 16) body(column, Sixteen{});
    for_each_vector(size - column, [&](int64_t i, auto lanes) { body(column + i, Eight<decltype(lanes)>{lanes}); });
}

// The convolution of one slice of channels: a state is the last taps - 1 inputs, the oldest first.
struct Convolution {
    Float32* out;
    Rows x;
    const Float32 *weight, *bias;  // [taps, channels], [channels] or null
    Float32* states;
    int64_t channels, taps, block_stride, is_silu;

    Float32* state(int64_t block, int64_t index) const { return states + block * block_stride + index * channels; }

    // The input `index` of those from taps - 1 before row `first` on; null: before the request began.
    const Float32* input(int64_t index, int64_t first, int64_t source) const {
        if (index >= taps - 1) return x.at(first + index - (taps - 1), 0);
        return source ? state(source, index) : nullptr;
    }

    void run(const StateBatch& batch, int64_t request, int64_t channel, int64_t width) const {
        for_each_piece(batch, request, [&](int64_t first, int64_t last, int64_t source, int64_t target) {
            for (int64_t row = first; row < last; ++row) convolve(row, first, source, channel, width);
            // What is read stands behind what is written, where both are the same state.
            for (int64_t index = 0; target && index < taps - 1; ++index) {
                const Float32* from = input(last - first + index, first, source);
                for_each_vector(width, [&](int64_t i, auto lanes) {
                    store(state(target, index) + channel + i, from ? load(from + channel + i, lanes) : Vec{}, lanes);
                });
            }
        });
    }

    void convolve(int64_t row, int64_t first, int64_t source, int64_t channel, int64_t width) const {
        alignas(64) Float32 sums[kWideSlice];
        for_each_columns(width, [&](int64_t i, auto lanes) {
            lanes.store(sums + i, bias ? lanes.load(bias + channel + i) : lanes.splat(0.0f));
        });
        for (int64_t tap = 0; tap < taps; ++tap) {
            const Float32 *from = input(row - first + tap, first, source), *by = weight + tap * channels + channel;
            if (from) for_each_columns(width, [&](int64_t i, auto lanes) {
                lanes.store(sums + i, fma(lanes.load(by + i), lanes.load(from + channel + i), lanes.load(sums + i)));
            });
        }
        Float32* to = out + row * channels + channel;
        for_each_columns(width, [&](int64_t i, auto lanes) {
            const auto sum = lanes.load(sums + i);
            lanes.store(to + i, is_silu ? lanes.silu(sum) : sum);
        });
    }
};

// Mamba: each channel has states of its own, and each of these a decay.
struct SelectiveScan {
    Float32* out;
    Rows x, dt, b, c, gate;
    const Float32 *a, *skip;  // [states, channels], [channels]
    Float32* states;
    int64_t channels, count, block_stride;

    void run(const StateBatch& batch, int64_t request, int64_t channel, int64_t width) const {
        Float32 state[kMostStates * kSlice], decays[kMostStates * kSlice];
        copy(decays, kSlice, a + channel, channels, width);
        for_each_piece(batch, request, [&](int64_t first, int64_t last, int64_t source, int64_t target) {
            if (source) copy(state, kSlice, states + source * block_stride + channel, channels, width);
            else __builtin_memset(state, 0, static_cast<size_t>(count * kSlice) * sizeof(float));
            for (int64_t row = first; row < last; ++row)
                for_each_vector(width, [&](int64_t i, auto lanes) { step(state + i, decays + i, row, channel + i, lanes); });
            if (target) copy(states + target * block_stride + channel, channels, state, kSlice, width);
        });
    }

    template <class Lanes>
    void step(Float32* state, const Float32* decays, int64_t row, int64_t channel, Lanes lanes) const {
        const Vec input = load(x.at(row, channel), lanes), time = softplus(load(dt.at(row, channel), lanes));
        const Vec added = time * input;
        const Float32 *into = b.at(row, 0), *from = c.at(row, 0);
        Vec sum = {};
        for (int64_t n = 0; n < count; ++n) {
            Float32* at = state + n * kSlice;
            const Vec decay = exp(time * load(decays + n * kSlice, lanes));
            const Vec now = fma(load(at, lanes), decay, added * into[n].value);
            store(at, now, lanes);
            sum = fma(now, splat(from[n].value), sum);
        }
        sum = fma(load(skip + channel, lanes), input, sum);
        if (gate.data) sum = sum * silu(load(gate.at(row, channel), lanes));
        store(out + row * channels + channel, sum, lanes);
    }

    void copy(Float32* to, int64_t to_stride, const Float32* from, int64_t from_stride, int64_t width) const {
        for (int64_t n = 0; n < count; ++n)
            for_each_vector(width, [&](int64_t i, auto lanes) {
                store(to + n * to_stride + i, load(from + n * from_stride + i, lanes), lanes);
            });
    }
};

// Mamba 2: a head has a state [states, size], all of which decays alike.
struct HeadScan {
    Float32* out;
    Rows x, dt, b, c, gate;
    const Float32 *a, *skip, *dt_bias;  // one for each head
    Float32* states;
    int64_t heads, size, groups, count, block_stride;
    float least_time, most_time;

    static constexpr int64_t kRows = 4;  // that share a walk through the state

    // What a row does to a head's state, and what it makes of it.
    struct Read {
        const Float32 *x, *b, *c;
        Float32* out;
        float time, decay;
    };

    void run(const StateBatch& batch, int64_t request, int64_t head) const {
        for_each_piece(batch, request, [&](int64_t first, int64_t last, int64_t source, int64_t target) {
            if (!target) return try_drafts(first, last, source, head);
            Float32* state = state_of(target, head);
            if (source != target) take(state, source, head);
            advance_all(state, first, last, head);
        });
    }

    Float32* state_of(int64_t block, int64_t head) const { return states + block * block_stride + head * count * size; }

    void take(Float32* state, int64_t source, int64_t head) const {
        const size_t bytes = static_cast<size_t>(count * size) * sizeof(float);
        if (source) __builtin_memcpy(state, state_of(source, head), bytes);
        else __builtin_memset(state, 0, bytes);
    }

    // Drafts change a copy, which is left nowhere; the room for it is taken of the stack only where there are some.
    __attribute__((noinline)) void try_drafts(int64_t first, int64_t last, int64_t source, int64_t head) const {
        alignas(64) Float32 state[kMostOfHead];
        take(state, source, head);
        advance_all(state, first, last, head);
    }

    void advance_all(Float32* state, int64_t first, int64_t last, int64_t head) const {
        int64_t row = first;
        for (; row + kRows <= last; row += kRows) advance<kRows>(state, row, head);
        for (; row < last; ++row) advance<1>(state, row, head);
    }

    Read read(int64_t row, int64_t head) const {
        float time = softplus(splat(dt.at(row, head)->value + dt_bias[head].value))[0];
        time = time < least_time ? least_time : time;
        time = time > most_time ? most_time : time;
        const int64_t group = head / (heads / groups) * count;
        return {x.at(row, head * size), b.at(row, group), c.at(row, group), out + (row * heads + head) * size, time,
                exp(splat(time * a[head].value))[0]};
    }

    template <int64_t kCount>
    void advance(Float32* state, int64_t row, int64_t head) const {
        Read reads[kCount];
        for (int64_t r = 0; r < kCount; ++r) reads[r] = read(row + r, head);
        for_each_columns(size, [&](int64_t column, auto lanes) { walk(state + column, reads, column, lanes); });
        for (int64_t r = 0; r < kCount; ++r) finish(row + r, head);
    }

    // Some columns of a head's state through some rows, of which `out` gets the sums.
    template <int64_t kCount, class Lanes>
    void walk(Float32* state, const Read (&reads)[kCount], int64_t column, Lanes lanes) const {
        typename Lanes::Value added[kCount], decays[kCount], sums[kCount];
        for (int64_t r = 0; r < kCount; ++r) {
            added[r] = lanes.load(reads[r].x + column) * lanes.splat(reads[r].time);
            decays[r] = lanes.splat(reads[r].decay);
            sums[r] = lanes.splat(0.0f);
        }
        for (int64_t n = 0; n < count; ++n) {
            auto now = lanes.load(state + n * size);
            for (int64_t r = 0; r < kCount; ++r) {
                now = fma(added[r], lanes.splat(reads[r].b[n].value), now * decays[r]);
                sums[r] = fma(now, lanes.splat(reads[r].c[n].value), sums[r]);
            }
            lanes.store(state + n * size, now);
        }
        for (int64_t r = 0; r < kCount; ++r) lanes.store(reads[r].out + column, sums[r]);
    }

    void finish(int64_t row, int64_t head) const {
        for_each_vector(size, [&](int64_t i, auto lanes) {
            const int64_t column = head * size + i;
            Float32* at = out + row * heads * size + column;
            Vec sum = fma(load(x.at(row, column), lanes), splat(skip[head].value), load(at, lanes));
            if (gate.data) sum = sum * silu(load(gate.at(row, column), lanes));
            store(at, sum, lanes);
        });
    }
};

}  // namespace

// All return 0, or 1 + the number of a request that is out of bounds, in which case nothing is computed; -1 for a head that is
// too large.

int64_t causal_conv(void* out, const void* x, const void* weight, const void* bias, void* states, const int32_t* starts,
                    const int32_t* lengths, const int32_t* kept, const int32_t* tables, int64_t rows, int64_t requests,
                    int64_t table_width, int64_t block_size, int64_t num_blocks, int64_t block_stride, int64_t x_stride,
                    int64_t channels, int64_t taps, int64_t is_silu) {
    const StateBatch batch{starts, lengths, kept, tables, rows, requests, table_width, block_size, num_blocks};
    if (const int64_t bad = find_bad_request(batch)) return bad;
    clear_rows_of_no_request(batch, out, channels);
    const Convolution conv{static_cast<Float32*>(out), rows_of(x, x_stride), static_cast<const Float32*>(weight),
                           static_cast<const Float32*>(bias), static_cast<Float32*>(states), channels, taps, block_stride, is_silu};
    share_slices<kWideSlice>(batch, channels, rows * channels * (taps + kElementWork), [=](int64_t request, int64_t begin, int64_t width) {
        conv.run(batch, request, begin, width);
    });
    return 0;
}

int64_t selective_scan(void* out, const void* x, const void* dt, const void* a, const void* b, const void* c, const void* skip,
                       const void* gate, void* states, const int32_t* starts, const int32_t* lengths, const int32_t* kept,
                       const int32_t* tables, int64_t rows, int64_t requests, int64_t table_width, int64_t block_size,
                       int64_t num_blocks, int64_t block_stride, int64_t x_stride, int64_t dt_stride, int64_t b_stride,
                       int64_t c_stride, int64_t gate_stride, int64_t channels, int64_t count) {
    const StateBatch batch{starts, lengths, kept, tables, rows, requests, table_width, block_size, num_blocks};
    if (const int64_t bad = find_bad_request(batch)) return bad;
    clear_rows_of_no_request(batch, out, channels);
    const SelectiveScan scan{static_cast<Float32*>(out), rows_of(x, x_stride), rows_of(dt, dt_stride), rows_of(b, b_stride),
                             rows_of(c, c_stride), rows_of(gate, gate_stride), static_cast<const Float32*>(a),
                             static_cast<const Float32*>(skip), static_cast<Float32*>(states), channels, count, block_stride};
    share_slices<kSlice>(batch, channels, rows * channels * count * kExpWork, [=](int64_t request, int64_t begin, int64_t width) {
        scan.run(batch, request, begin, width);
    });
    return 0;
}

int64_t ssd_scan(void* out, const void* x, const void* dt, const void* a, const void* b, const void* c, const void* skip,
                 const void* dt_bias, const void* gate, void* states, const int32_t* starts, const int32_t* lengths,
                 const int32_t* kept, const int32_t* tables, int64_t rows, int64_t requests, int64_t table_width,
                 int64_t block_size, int64_t num_blocks, int64_t block_stride, int64_t x_stride, int64_t dt_stride,
                 int64_t b_stride, int64_t c_stride, int64_t gate_stride, int64_t heads, int64_t size, int64_t groups,
                 int64_t count, float least_time, float most_time) {
    if (count * size > kMostOfHead) return -1;
    const StateBatch batch{starts, lengths, kept, tables, rows, requests, table_width, block_size, num_blocks};
    if (const int64_t bad = find_bad_request(batch)) return bad;
    clear_rows_of_no_request(batch, out, heads * size);
    const HeadScan scan{static_cast<Float32*>(out), rows_of(x, x_stride), rows_of(dt, dt_stride), rows_of(b, b_stride),
                        rows_of(c, c_stride), rows_of(gate, gate_stride), static_cast<const Float32*>(a),
                        static_cast<const Float32*>(skip), static_cast<const Float32*>(dt_bias),
                        static_cast<Float32*>(states), heads, size, groups, count, block_stride, least_time, most_time};
    share(requests * heads, 2 * rows * heads * size * count, [=](int64_t item) {
        scan.run(batch, item / heads, item % heads);
    });
    return 0;
}

}}  // namespace quire::QUIRE_ISA
