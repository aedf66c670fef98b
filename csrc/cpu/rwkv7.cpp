// SPDX-License-Identifier: Apache-2.0
// The heads of RWKV-7 (B. Peng et al., 2025, arXiv:2503.14456): a generalized delta rule, token by token, a norm of what it
// says, and a bonus for the token's own value.
//
// A head's state is a matrix [keys, values] of which each column is walked by itself, as in gated_delta.cpp, so no cut changes
// a bit. What a token has of its own is made before, and what needs a head's whole row, after.

#include "activations.h"
#include "norm.h"
#include "state_tile.h"
#include "states.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kMostSize = 256;
constexpr float kSlowest = -0.6065306597126334f;  // minus e to the power of minus a half
constexpr float kLeastLength = 1e-12f;            // by which a key is divided at least
constexpr int64_t kWide = kRegisters16 == 1 ? 2 : 1;  // registers of sixteen columns that are walked together

struct Heads {
    const Float32 *r, *w, *k, *v, *a, *of_heads;
    Float32 *states, *out;
    Float32 *decays, *units, *removed, *keys;  // [rows, heads * size] each: what a token does to the state
    int64_t heads, size, stride;
    float eps;

    int64_t width() const { return heads * size; }
    int64_t at(int64_t row, int64_t head) const { return row * width() + head * size; }
    const Float32* vector(int64_t index, int64_t head) const { return of_heads + index * width() + head * size; }
};

// Calls body(i) for eight channels of a head after the other.
template <class Body>
inline void for_channels(int64_t size, Body body) {
    for (int64_t i = 0; i < size; i += kLanes) body(i);
}

// Of a row and a head.
inline void make_numbers(const Heads& heads, int64_t row, int64_t head) {
    const int64_t at = heads.at(row, head);
    const Float32 *of_units = heads.vector(0, head), *of_rates = heads.vector(1, head);
    for_channels(heads.size, [&](int64_t i) {
        const Vec k = load(heads.k + at + i, All{}), rate = sigmoid(load(heads.a + at + i, All{}));
        store(heads.decays + at + i, exp(kSlowest * sigmoid(load(heads.w + at + i, All{}))), All{});
        store(heads.units + at + i, k * load(of_units + i, All{}), All{});
        store(heads.keys + at + i, k * fma(rate - 1.0f, load(of_rates + i, All{}), splat(1.0f)), All{});
    });
    const float squares = reduce_row(heads.units + at, heads.size, [](Vec x, Vec total) { return fma(x, x, total); });
    const float length = __builtin_sqrtf(squares), inverse = 1.0f / (length > kLeastLength ? length : kLeastLength);
    for_channels(heads.size, [&](int64_t i) {
        const Vec unit = load(heads.units + at + i, All{}) * inverse;
        store(heads.units + at + i, unit, All{});
        store(heads.removed + at + i, unit * sigmoid(load(heads.a + at + i, All{})), All{});
    });
}

// Walks a tile over a token: what it says of the unit vector is taken out, at the token's rates, and what it then says of r
// is the result.
template <int64_t width>
inline void walk(Float32* tile, const Heads& heads, int64_t row, int64_t head, int64_t column) {
    const int64_t at = heads.at(row, head);
    Lanes16 known[width], said[width], value[width];
    for (int64_t w = 0; w < width; ++w) {
        known[w] = said[w] = splat16(0.0f);
        value[w] = load16(heads.v + at + column + 16 * w);
    }
    for (int64_t i = 0; i < heads.size; ++i) {
        const Lanes16 unit = splat16(heads.units[at + i].value);
        for (int64_t w = 0; w < width; ++w) known[w] = fma(unit, load16(tile + (i * width + w) * 16), known[w]);
    }
    for (int64_t i = 0; i < heads.size; ++i) {
        const Lanes16 decay = splat16(heads.decays[at + i].value), removed = splat16(-heads.removed[at + i].value);
        const Lanes16 key = splat16(heads.keys[at + i].value), asked = splat16(heads.r[at + i].value);
        for (int64_t w = 0; w < width; ++w) {
            Float32* place = tile + (i * width + w) * 16;
            const Lanes16 state = fma(key, value[w], fma(removed, known[w], decay * load16(place)));
            store16(place, state);
            said[w] = fma(asked, state, said[w]);
        }
    }
    for (int64_t w = 0; w < width; ++w) store16(heads.out + at + column + 16 * w, said[w]);
}

// Columns [column, column + 16 * width) of a head, over all tokens of a request.
template <int64_t width>
inline void walk_request(const Heads& heads, const StateBatch& batch, int64_t request, int64_t head, int64_t column) {
    alignas(64) Float32 tile[kMostSize * 16 * width];
    const int64_t size = heads.size, at = head * size * size + column;
    for_each_piece(batch, request, [&](int64_t first, int64_t last, int64_t source, int64_t target) {
        if (source) {
            copy_tile<width>(tile, 16 * width, heads.states + source * heads.stride + at, size, size);
        } else {
            __builtin_memset(tile, 0, static_cast<size_t>(size * 16 * width) * sizeof(Float32));
        }
        for (int64_t row = first; row < last; ++row) walk<width>(tile, heads, row, head, column);
        if (target) copy_tile<width>(heads.states + target * heads.stride + at, size, tile, 16 * width, size);
    });
}

// All columns of all requests; a job is one tile of a head.
inline void walk_all(const Heads& heads, const StateBatch& batch) {
    const int64_t wide = 16 * kWide, tiles = (heads.size + wide - 1) / wide, jobs = batch.requests * heads.heads * tiles;
    share(jobs, 5 * batch.rows * heads.width() * heads.size, [&](int64_t job) {
        const int64_t request = job / (heads.heads * tiles), head = job / tiles % heads.heads, column = job % tiles * wide;
        if (column + wide <= heads.size) {
            walk_request<kWide>(heads, batch, request, head, column);
        } else {
            walk_request<1>(heads, batch, request, head, column);
        }
    });
}

// The layer norm of what a head said, and what the token's own value adds to it.
inline void finish(const Heads& heads, int64_t row, int64_t head) {
    const int64_t at = heads.at(row, head), size = heads.size;
    const auto add = [](Vec x, Vec total) { return x + total; };
    const float mean = reduce_row(heads.out + at, size, add) / static_cast<float>(size);
    const float squares = reduce_row(heads.out + at, size, [&](Vec x, Vec total) { return fma(x - mean, x - mean, total); });
    const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(size) + heads.eps);
    Vec sums = {};
    const Float32 *of_bonus = heads.vector(2, head), *weight = heads.vector(3, head), *bias = heads.vector(4, head);
    for_channels(size, [&](int64_t i) {
        const Vec key = load(heads.keys + at + i, All{}) * load(of_bonus + i, All{});
        sums = fma(load(heads.r + at + i, All{}), key, sums);
    });
    const Vec bonus = splat(sum(sums));
    for_channels(size, [&](int64_t i) {
        const Vec normed = (load(heads.out + at + i, All{}) - mean) * scale;
        const Vec said = fma(normed, load(weight + i, All{}), load(bias + i, All{}));
        store(heads.out + at + i, fma(bonus, load(heads.v + at + i, All{}), said), All{});
    });
}

}  // namespace

// `scratch` is [4, rows, heads * size]. Returns 1 + a request that does not fit, and nothing was done then; -1 for sizes that
// are not served.
int64_t rwkv7(void* out, const void* r, const void* w, const void* k, const void* v, const void* a, const void* of_heads,
              void* states, void* scratch, const int32_t* starts, const int32_t* lengths, const int32_t* kept,
              const int32_t* tables, int64_t rows, int64_t requests, int64_t table_width, int64_t block_size,
              int64_t num_blocks, int64_t stride, int64_t heads, int64_t size, float eps) {
    if (size > kMostSize || size % 16) return -1;
    const StateBatch batch = {starts, lengths, kept, tables, rows, requests, table_width, block_size, num_blocks};
    if (const int64_t bad = find_bad_request(batch)) return bad;
    const int64_t part = rows * heads * size;
    Float32* made = static_cast<Float32*>(scratch);
    const Heads all = {static_cast<const Float32*>(r), static_cast<const Float32*>(w), static_cast<const Float32*>(k),
                       static_cast<const Float32*>(v), static_cast<const Float32*>(a),
                       static_cast<const Float32*>(of_heads), static_cast<Float32*>(states), static_cast<Float32*>(out),
                       made, made + part, made + 2 * part, made + 3 * part, heads, size, stride, eps};
    share(rows * heads, 3 * kElementWork * part, [&](int64_t job) { make_numbers(all, job / heads, job % heads); });
    walk_all(all, batch);
    share(rows * heads, kElementWork * part, [&](int64_t job) { finish(all, job / heads, job % heads); });
    clear_rows_of_no_request(batch, out, all.width());
    return 0;
}

}}  // namespace quire::QUIRE_ISA
