// SPDX-License-Identifier: Apache-2.0
// What attention works on: a call, cut into items that are computed independently.

#pragma once

#include "kv_cache.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kKeyTile = 64;       // keys that share one step of the running maximum
constexpr int64_t kSplitTiles = 8;     // tiles that are summed up on their own
constexpr int64_t kLeastItemRows = 96, kMostItemRows = 192;  // enough to pay for what a tile costs once
constexpr int64_t kItemFloats = 1 << 16;                     // of queries, scores and sums: half of a second-level cache
constexpr int64_t kTileCostRows = 4;   // a tile costs about as much as this many rows before it has any

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

struct Batch {
    const int32_t *starts, *lengths, *tables;  // query_start_loc, seq_lens, block_tables
    int64_t tokens, requests, table_width;
};

// What a query may see, and how its scores are changed. Scores are in units of log 2.
struct Features {
    int64_t window;       // 0: none
    bool chunked;         // whether the window does not slide, but begins anew at each multiple of its size
    float soft_cap;       // 0: none
    const float* slopes;  // one for each query head; null: none
    const float* sinks;   // as slopes
    int64_t ahead;        // keys behind its own position that a query sees; 0 in causal attention
    const float* biases;  // of each query head, one for each distance from -center to center; null: none
    int64_t center;
    const int32_t* last_seen = nullptr;  // of each row of the batch, the last position that it sees; null: its own

    int64_t first_key(int64_t position) const {
        if (!window) return 0;
        return chunked ? position - position % window : larger_of(position - window + 1, 0);
    }
    int64_t end_key(int64_t position) const { return position + ahead + 1; }
};

struct Call;
struct Item;
struct Scratch;

// The parts that depend on element types; everything else computes in float32.
struct Types {
    void (*attend_tile)(const Call& call, const Item& item, int64_t tile, const Scratch& scratch);
    void (*load_queries)(Float32* rows, const Call& call, const Item& item);
    void (*store_row)(const Call& call, int64_t token, int64_t head, const Float32* row, float factor);
};

struct Call {
    void* out;
    const void *q, *keys, *values;
    Batch batch;
    CacheShape shape;
    int64_t value_size;  // elements of a value, and of what comes out; keys and queries have the head size
    int64_t group, token_stride, head_stride;
    float scale;
    Features features;
    Types types;
};

// A request, a key-value head and a few of the request's queries, with all query heads of that head as rows.
struct Item {
    int64_t request, head, token, queries, position;  // first row in the batch, number of queries, position of the first
    int64_t length;                                   // tokens of the request

    int64_t rows(const Call& call) const { return queries * call.group; }
    const int32_t* table(const Call& call) const { return call.batch.tables + request * call.batch.table_width; }
    int64_t last() const { return position + queries - 1; }
    // Behind the last key that the query at some position, one of the item's, sees.
    int64_t end_key(const Features& f, int64_t at) const {
        return smaller_of(f.last_seen ? f.last_seen[token + at - position] + 1 : f.end_key(at), length);
    }
    int64_t end_tile(const Features& f) const { return ceil_div(larger_of(end_key(f, last()), 0), kKeyTile); }
    // First key that any query sees.
    int64_t first_key(const Features& f) const { return f.first_key(larger_of(position, 0)); }
    int64_t first_split(const Features& f) const { return first_key(f) / kKeyTile / kSplitTiles; }
    int64_t end_split(const Features& f) const {
        return larger_of(ceil_div(end_tile(f), kSplitTiles), first_split(f) + 1);
    }
    // The tiles of a split that some query sees.
    int64_t first_tile(const Features& f, int64_t split) const {
        return larger_of(first_key(f) / kKeyTile, split * kSplitTiles);
    }
    int64_t end_tile(const Features& f, int64_t split) const {
        return smaller_of(end_tile(f), (split + 1) * kSplitTiles);
    }
};

// In rows of a tile.
inline int64_t cost(const Call& call, const Item& item, int64_t split) {
    const int64_t tiles = item.end_tile(call.features, split) - item.first_tile(call.features, split);
    return 1 + larger_of(tiles, 0) * (item.rows(call) + kTileCostRows);
}

// Rows of the largest item, of which there should be so many at least. How rows are cut into items changes no bit.
inline int64_t item_rows(const Call& call, int64_t items) {
    const int64_t all = call.batch.tokens * call.shape.heads * call.group;
    const int64_t fit = kItemFloats / (kKeyTile + call.shape.head_size + call.value_size);
    return larger_of(kLeastItemRows, smaller_of(kMostItemRows, smaller_of(fit, all / items)));
}

// Calls body(item) for all items of up to so many rows, in an order that keeps neighbors on the same keys.
template <class Body>
inline void for_each_item(const Call& call, int64_t rows, Body body) {
    const Batch& batch = call.batch;
    const int64_t most = larger_of(rows / call.group, 1);
    for (int64_t r = 0; r < batch.requests; ++r) {
        const int64_t start = batch.starts[r], count = batch.starts[r + 1] - start;
        for (int64_t head = 0; head < call.shape.heads; ++head)
            for (int64_t i = 0; i < count; i += most)
                body(Item{r, head, start + i, smaller_of(most, count - i), batch.lengths[r] - count + i,
                          batch.lengths[r]});
    }
}

}}}  // namespace quire::QUIRE_ISA
