// SPDX-License-Identifier: Apache-2.0
// The gated delta rule (S. Yang et al., 2024, arXiv:2412.06464), token by token; its state decays as a whole, or each channel
// of the keys at its own rate (Kimi team, 2025, arXiv:2510.26692).
//
// A head's state is a matrix [keys, values] of which each column is walked by itself, so neither the cut into columns, nor
// that into chunks of tokens, nor the number of threads changes a bit. Keys and queries enter as they are: what would norm
// them is a factor of the few numbers that a token has of its own.

#include "state_tile.h"
#include "states.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kMostKeys = 256;
constexpr int64_t kWide = kRegisters16 == 1 ? 2 : 1;  // registers of sixteen columns that are walked together
constexpr float kLeastSquare = 1e-6f;                 // added to the squared length of a key or a query

// What a token does to the state of a value head, beside its decay. A decay of the whole state is a factor of the first and
// the third: the walk meets the state before it. One by channels has been at work there.
struct Gates {
    float known;        // of what the state says of the raw key
    float rate;         // of the difference to the value
    float asked;        // of what the state says of the raw query
    float asked_change; // of the change
};

struct Delta {
    const Float32 *qkv, *ba, *rates, *bias;
    Float32 *states, *out, *decays;
    Gates* gates;
    int64_t key_heads, value_heads, keys, values, stride;
    int64_t steps;    // of a value head: one, or one for each key channel
    float strongest;  // what strengths of writing go up to
    float least;      // what logarithms of decays go down to; 0: they have no bound

    int64_t row() const { return 2 * key_heads * keys + value_heads * values; }
    const Float32* query(int64_t row_index, int64_t key_head) const { return qkv + row_index * row() + key_head * keys; }
    const Float32* key(int64_t row_index, int64_t key_head) const { return query(row_index, key_heads + key_head); }
    int64_t key_head(int64_t head) const { return head * key_heads / value_heads; }
    const Float32* value(int64_t row_index, int64_t head) const {
        return query(row_index, 2 * key_heads) + head * values;
    }
    Float32* decay(int64_t row_index, int64_t head) const { return decays + (row_index * value_heads + head) * steps; }
};

inline float dot(const Float32* a, const Float32* b, int64_t n) {
    Vec total = {};
    for (int64_t i = 0; i < n; i += kLanes) total = fma(load(a + i, All{}), load(b + i, All{}), total);
    return sum(total);
}

// What a time step leaves of a state; `rate` is below 0.
inline Vec decay_of(Vec step, float rate, float least) {
    return exp(least < 0.0f ? least / (exp(rate * step) + 1.0f) : rate * softplus(step));
}

// What is left of a head's state, or of each of its channels.
inline void make_decays(Float32* out, const Float32* steps, const Float32* bias, float rate, float least, int64_t count) {
    if (count == 1) {
        out->value = decay_of(splat(steps->value + bias->value), rate, least)[0];
        return;
    }
    for (int64_t i = 0; i < count; i += kLanes) {
        store(out + i, decay_of(load(steps + i, All{}) + load(bias + i, All{}), rate, least), All{});
    }
}

// Of a row; ba has the write strengths of all value heads, and then their time steps.
inline void make_gates(const Delta& delta, int64_t row) {
    const float unit = 1.0f / __builtin_sqrtf(static_cast<float>(delta.keys));
    float key_length = 0.0f, query_length = 0.0f, both = 0.0f;
    for (int64_t head = 0; head < delta.value_heads; ++head) {
        const int64_t key_head = delta.key_head(head);
        if (head == 0 || key_head != delta.key_head(head - 1)) {
            const Float32 *k = delta.key(row, key_head), *q = delta.query(row, key_head);
            key_length = 1.0f / __builtin_sqrtf(dot(k, k, delta.keys) + kLeastSquare);
            query_length = unit / __builtin_sqrtf(dot(q, q, delta.keys) + kLeastSquare);
            both = dot(q, k, delta.keys);
        }
        const Float32* strengths = delta.ba + row * delta.value_heads * (1 + delta.steps);
        const Float32* steps = strengths + delta.value_heads + head * delta.steps;
        Float32* decays = delta.decay(row, head);
        make_decays(decays, steps, delta.bias + head * delta.steps, delta.rates[head].value, delta.least, delta.steps);
        const float decay = delta.steps == 1 ? decays->value : 1.0f;
        const float strength = delta.strongest / (exp(splat(-strengths[head].value))[0] + 1.0f);
        delta.gates[row * delta.value_heads + head] = {decay * key_length, strength * key_length, decay * query_length,
                                                       both * query_length};
    }
}

// Walks a tile over a token: what it says of the key is corrected, and what it then says of the query is the result.
template <int64_t width, bool by_channel>
inline void walk(Float32* tile, const Float32* k, const Float32* q, const Float32* v, const Gates& gates,
                 const Float32* decays, Float32* out, int64_t keys) {
    // Even and odd rows are summed apart: a single sum would wait for itself.
    Lanes16 known[2][width], asked[2][width], change[width];
    for (int64_t w = 0; w < width; ++w) known[0][w] = known[1][w] = asked[0][w] = asked[1][w] = splat16(0.0f);
    for (int64_t i = 0; i < keys; i += 2) {
        for (int64_t odd = 0; odd < 2; ++odd) {
            const Lanes16 key = splat16(k[i + odd].value), query = splat16(q[i + odd].value);
            for (int64_t w = 0; w < width; ++w) {
                Lanes16 state = load16(tile + (i + odd) * 16 * width + 16 * w);
                if constexpr (by_channel) state = splat16(decays[i + odd].value) * state;
                known[odd][w] = fma(key, state, known[odd][w]);
                asked[odd][w] = fma(query, state, asked[odd][w]);
            }
        }
    }
    const Lanes16 one = splat16(1.0f), rate = splat16(gates.rate), whole = splat16(decays->value);
    for (int64_t w = 0; w < width; ++w) {
        const Lanes16 known_now = fma(one, known[0][w], known[1][w]), asked_now = fma(one, asked[0][w], asked[1][w]);
        change[w] = rate * fma(splat16(-gates.known), known_now, load16(v + 16 * w));
        store16(out + 16 * w, fma(splat16(gates.asked_change), change[w], splat16(gates.asked) * asked_now));
    }
    for (int64_t i = 0; i < keys; ++i) {
        const Lanes16 key = splat16(k[i].value), decay = by_channel ? splat16(decays[i].value) : whole;
        for (int64_t w = 0; w < width; ++w) {
            Float32* at = tile + i * 16 * width + 16 * w;
            store16(at, fma(key, change[w], decay * load16(at)));
        }
    }
}

// Columns [column, column + 16 * width) of a head, over all tokens of a request.
template <int64_t width, bool by_channel>
inline void walk_request(const Delta& delta, const StateBatch& batch, int64_t request, int64_t head, int64_t column) {
    alignas(64) Float32 tile[kMostKeys * 16 * width];
    const int64_t key_head = delta.key_head(head), at = head * delta.keys * delta.values + column;
    for_each_piece(batch, request, [&](int64_t first, int64_t last, int64_t source, int64_t target) {
        if (source) {
            copy_tile<width>(tile, 16 * width, delta.states + source * delta.stride + at, delta.values, delta.keys);
        } else {
            __builtin_memset(tile, 0, static_cast<size_t>(delta.keys * 16 * width) * sizeof(Float32));
        }
        for (int64_t row = first; row < last; ++row) {
            walk<width, by_channel>(tile, delta.key(row, key_head), delta.query(row, key_head),
                                    delta.value(row, head) + column, delta.gates[row * delta.value_heads + head],
                                    delta.decay(row, head),
                                    delta.out + (row * delta.value_heads + head) * delta.values + column, delta.keys);
        }
        if (target) copy_tile<width>(delta.states + target * delta.stride + at, delta.values, tile, 16 * width, delta.keys);
    });
}

// All columns of all requests; a job is one tile of a head.
template <bool by_channel>
inline void walk_all(const Delta& delta, const StateBatch& batch) {
    const int64_t tiles = (delta.values + 16 * kWide - 1) / (16 * kWide), jobs = batch.requests * delta.value_heads * tiles;
    share(jobs, 4 * batch.rows * delta.value_heads * delta.values * delta.keys, [&](int64_t job) {
        const int64_t request = job / (delta.value_heads * tiles), head = job / tiles % delta.value_heads;
        const int64_t column = job % tiles * 16 * kWide;
        if (column + 16 * kWide <= delta.values) {
            walk_request<kWide, by_channel>(delta, batch, request, head, column);
        } else {
            walk_request<1, by_channel>(delta, batch, request, head, column);
        }
    });
}

}  // namespace

// `steps` is 1, or `keys`, of a value head; `decays` [rows, value heads, steps] and `gates` are scratch. Returns 1 + a request
// that does not fit, and nothing was done then; -1 for sizes that are not served.
int64_t gated_delta(void* out, const void* qkv, const void* ba, const void* rates, const void* bias, void* states,
                    void* gates, void* decays, const int32_t* starts, const int32_t* lengths, const int32_t* kept,
                    const int32_t* tables, int64_t rows, int64_t requests, int64_t table_width, int64_t block_size,
                    int64_t num_blocks, int64_t stride, int64_t key_heads, int64_t value_heads, int64_t keys,
                    int64_t values, int64_t steps, float strongest, float least) {
    if (keys > kMostKeys || keys % kLanes || values % 16) return -1;
    const StateBatch batch = {starts, lengths, kept, tables, rows, requests, table_width, block_size, num_blocks};
    if (const int64_t bad = find_bad_request(batch)) return bad;
    const Delta delta = {static_cast<const Float32*>(qkv), static_cast<const Float32*>(ba),
                         static_cast<const Float32*>(rates), static_cast<const Float32*>(bias),
                         static_cast<Float32*>(states), static_cast<Float32*>(out), static_cast<Float32*>(decays),
                         static_cast<Gates*>(gates), key_heads, value_heads, keys, values, stride, steps, strongest,
                         least};
    clear_rows_of_no_request(batch, out, value_heads * values);
    share(rows, kElementWork * rows * (key_heads * keys + (3 + steps) * value_heads),
          [&](int64_t row) { make_gates(delta, row); });
    if (steps == 1) {
        walk_all<false>(delta, batch);
    } else {
        walk_all<true>(delta, batch);
    }
    return 0;
}

}}  // namespace quire::QUIRE_ISA
