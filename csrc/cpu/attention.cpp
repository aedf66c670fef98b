// Attention over the paged cache: one kernel for prefill, decode and mixed batches.
//
// The work is cut into items: a request, a key-value head and a few of the request's queries, with all query heads of that
// head as rows. An item walks its keys in tiles of kKeyTile positions and in splits of kSplitTiles tiles, both counted
// from position 0, never from where the batch happens to begin. A split starts from nothing and is merged, in order, into
// the splits before it, always, whether or not they ran on different threads. So neither batch, chunk, block nor
// thread changes a bit of a query's output.

#include "attention_tile.h"
#include "kv_cache.h"

#include <cstdlib>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kSplitTiles = 8;
constexpr int64_t kItemRows = 96;                // enough to pay for the conversion of a tile, few enough for the cache
constexpr int64_t kPadding = 2 * kLanes;         // keeps the rows of a tile from falling into few cache sets
constexpr int64_t kConversionRows = 8;           // converting a tile costs about as much as this many rows
constexpr int64_t kParallelCost = 1 << 19;       // multiply-adds that are worth a second thread
constexpr int64_t kNoMemory = -2;

inline int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Batch {
    const int32_t *starts, *lengths, *tables;  // query_start_loc, seq_lens, block_tables
    int64_t tokens, requests, table_width;
};

struct Call;
struct Item;

// The parts that depend on element types; everything else computes in float32.
struct Types {
    int64_t element_bytes, vector_bytes;  // of the cache
    void (*load_keys)(Float32* tile, const Call& call, const Item& item, int64_t start, int64_t low, int64_t high);
    void (*load_values)(Float32* tile, const Call& call, const Item& item, int64_t start, int64_t low, int64_t high);
    void (*load_queries)(Float32* rows, const Call& call, const Item& item);
    void (*store_row)(const Call& call, int64_t token, int64_t head, const Float32* row, float factor);
};

struct Call {
    void* out;
    const void *q, *keys, *values;
    Batch batch;
    CacheShape shape;
    int64_t group, token_stride, head_stride;
    float scale;
    Features features;
    Types types;
};

struct Item {
    int64_t request, head, token, queries, position;  // first row in the batch, number of queries, position of the first

    int64_t last() const { return position + queries - 1; }
    int64_t end_tile() const { return ceil_div(larger_of(last() + 1, 0), kKeyTile); }
    // First key that any query sees.
    int64_t first_key(const Features& f) const { return f.window ? larger_of(position - f.window + 1, 0) : 0; }
    int64_t first_split(const Features& f) const { return first_key(f) / kKeyTile / kSplitTiles; }
    int64_t end_split(const Features& f) const {
        return larger_of(ceil_div(end_tile(), kSplitTiles), first_split(f) + 1);
    }
    // The tiles of a split that some query sees.
    int64_t first_tile(const Features& f, int64_t split) const {
        return larger_of(first_key(f) / kKeyTile, split * kSplitTiles);
    }
    int64_t end_tile(int64_t split) const { return smaller_of(end_tile(), (split + 1) * kSplitTiles); }
};

inline int64_t cost(const Call& call, const Item& item, int64_t split) {
    const int64_t tiles = item.end_tile(split) - item.first_tile(call.features, split);
    return 1 + larger_of(tiles, 0) * (item.queries * call.group + kConversionRows);
}

// Calls body(item) for all items, in an order that keeps neighbours on the same keys.
template <class Body>
inline void for_each_item(const Call& call, Body body) {
    const Batch& batch = call.batch;
    const int64_t most = larger_of(kItemRows / call.group, 1);
    for (int64_t r = 0; r < batch.requests; ++r) {
        const int64_t start = batch.starts[r], count = batch.starts[r + 1] - start;
        for (int64_t head = 0; head < call.shape.heads; ++head)
            for (int64_t i = 0; i < count; i += most)
                body(Item{r, head, start + i, smaller_of(most, count - i), batch.lengths[r] - count + i});
    }
}

template <class C>
void load_keys(Float32* tile, const Call& call, const Item& item, int64_t start, int64_t low, int64_t high) {
    const int64_t size = call.shape.block_size, n = call.shape.head_size;
    const int32_t* table = call.batch.tables + item.request * call.batch.table_width;
    for (int64_t at = low / size * size; at < high; at += size) {
        const C* block = static_cast<const C*>(call.keys) + block_start<C>(call.shape, table[at / size], item.head);
        const int64_t first = larger_of(at, start), count = smaller_of(at + size, start + kKeyTile) - first;
        for_each_vector(count, [&](int64_t i, auto lanes) {
            const int64_t offset = first - at + i;
            Float32* column = tile + (first - start) + i;
            Vec scale = splat(1.0f);
            if constexpr (kScaleElements<C> != 0)
                scale = load(reinterpret_cast<const Float32*>(block + n * size) + offset, lanes);
            for (int64_t d = 0; d < n; ++d)
                store(column + d * (kKeyTile + kPadding), load(block + d * size + offset, lanes) * scale, lanes);
        });
    }
}

template <class C>
void load_values(Float32* tile, const Call& call, const Item& item, int64_t start, int64_t low, int64_t high) {
    const int64_t size = call.shape.block_size, n = call.shape.head_size;
    const int32_t* table = call.batch.tables + item.request * call.batch.table_width;
    for (int64_t at = low / size * size; at < high; at += size) {
        const C* block = static_cast<const C*>(call.values) + block_start<C>(call.shape, table[at / size], item.head);
        for (int64_t key = larger_of(at, low); key < smaller_of(at + size, high); ++key) {
            const C* value = block + (key - at) * (n + kScaleElements<C>);
            float scale = 1.0f;
            if constexpr (kScaleElements<C> != 0) scale = load_scale(value + n);
            Float32* row = tile + (key - start) * (n + kPadding);
            for (int64_t d = 0; d < n; d += kLanes) store(row + d, load(value + d, All{}) * scale, All{});
        }
    }
}

template <class T>
void load_queries(Float32* rows, const Call& call, const Item& item) {
    const int64_t n = call.shape.head_size;
    for (int64_t row = 0; row < item.queries * call.group; ++row) {
        const int64_t token = item.token + row / call.group, head = item.head * call.group + row % call.group;
        const T* q = static_cast<const T*>(call.q) + token * call.token_stride + head * call.head_stride;
        for (int64_t d = 0; d < n; d += kLanes) store(rows + row * n + d, load(q + d, All{}) * call.scale, All{});
    }
}

template <class T>
void store_row(const Call& call, int64_t token, int64_t head, const Float32* row, float factor) {
    const int64_t n = call.shape.head_size;
    T* out = static_cast<T*>(call.out) + (token * call.shape.heads * call.group + head) * n;
    // Adding 0 makes one zero of both: the sign of a sum of zeros would tell which tiles were skipped.
    for (int64_t d = 0; d < n; d += kLanes) store(out + d, load(row + d, All{}) * factor + 0.0f, All{});
}

// The state of all rows of an item over some of its keys.
struct Part {
    Float32* out;  // [rows][head size]
    Running* running;

    void clear(int64_t rows, int64_t n) const {
        __builtin_memset(out, 0, static_cast<size_t>(rows * n) * sizeof(Float32));
        for (int64_t r = 0; r < rows; ++r) running[r] = {-__builtin_inff(), 0.0f};
    }
    void add(const Part& later, int64_t rows, int64_t n) const {
        for (int64_t r = 0; r < rows; ++r) merge_row(out + r * n, running[r], later.out + r * n, later.running[r], n);
    }
};

// Even, so that pointers may follow.
inline int64_t part_floats(int64_t rows, int64_t n) { return rows * (n + 2); }

inline Part part_at(Float32* memory, int64_t rows, int64_t n) {
    return {memory, reinterpret_cast<Running*>(memory + rows * n)};
}

// One thread's memory for any item of a call.
struct Scratch {
    Part split, whole;
    Float32 *queries, *scores, *tile;
    float* factors;

    static int64_t floats(int64_t rows, int64_t n) {
        const int64_t tile = larger_of(n * (kKeyTile + kPadding), kKeyTile * (n + kPadding));
        return ceil_div(2 * part_floats(rows, n) + rows * (n + kKeyTile + 1) + tile, kPadding) * kPadding;
    }
    Scratch(Float32* memory, int64_t rows, int64_t n) {
        tile = memory;
        scores = tile + larger_of(n * (kKeyTile + kPadding), kKeyTile * (n + kPadding));
        queries = scores + rows * kKeyTile;
        split = part_at(queries + rows * n, rows, n);
        whole = part_at(split.out + part_floats(rows, n), rows, n);
        factors = reinterpret_cast<float*>(whole.out + part_floats(rows, n));
    }
};

// Scores of a tile to weights, row by row.
inline void weigh(const Call& call, const Item& item, int64_t start, int64_t columns, const Scratch& scratch) {
    const Features& features = call.features;
    for (int64_t row = 0; row < item.queries * call.group; ++row) {
        Float32* scores = scratch.scores + row * kKeyTile;
        const int64_t position = item.position + row / call.group;
        if (features.soft_cap != 0.0f || features.slopes) {
            const float slope = features.slopes ? features.slopes[item.head * call.group + row % call.group] : 0.0f;
            apply_features(scores, columns, features, slope * kLog2E, position - start);
        }
        const int64_t low = features.window ? position - features.window + 1 - start : 0;
        const int64_t high = position + 1 - start;
        if (low > 0 || high < columns)
            mask_row(scores, columns, smaller_of(larger_of(low, 0), kKeyTile), smaller_of(larger_of(high, 0), kKeyTile));
        scratch.factors[row] = softmax_row(scores, columns, scratch.split.running[row]);
    }
}

// The keys of a tile that some row of the item sees: positions [low, high).
struct Seen {
    int64_t start, low, high;

    Seen(const Call& call, const Item& item, int64_t tile)
        : start(tile * kKeyTile),
          low(larger_of(item.first_key(call.features), start)),
          high(smaller_of(item.last() + 1, start + kKeyTile)) {}
};

inline Prefetcher keys_or_values(const Call& call, const Item& item, const Seen& seen, bool keys) {
    const int64_t bytes = call.shape.block_size * call.types.vector_bytes, unit = call.types.element_bytes;
    return Prefetcher({static_cast<const char*>(keys ? call.keys : call.values) + item.head * bytes,
                       call.shape.heads * bytes, keys ? call.types.vector_bytes / unit : 1,
                       keys ? unit : call.types.vector_bytes, call.batch.tables + item.request * call.batch.table_width,
                       call.shape.block_size, seen.low, seen.high});
}

inline void attend_tile(const Call& call, const Item& item, int64_t tile, const Scratch& scratch) {
    const int64_t rows = item.queries * call.group, n = call.shape.head_size;
    const Seen seen(call, item, tile), next(call, item, tile + 1);
    const int64_t columns = ceil_div(seen.high - seen.start, kLanes) * kLanes, skipped = seen.low - seen.start;
    call.types.load_keys(scratch.tile, call, item, seen.start, seen.low, seen.high);
    multiply({scratch.scores, kKeyTile, nullptr, scratch.queries, n, scratch.tile, kKeyTile + kPadding, n}, rows,
             columns, keys_or_values(call, item, seen, false));
    weigh(call, item, seen.start, columns, scratch);
    call.types.load_values(scratch.tile, call, item, seen.start, seen.low, seen.high);
    // Keys before `low` have weight 0 in every row, and their values may be anything.
    multiply({scratch.split.out, n, scratch.factors, scratch.scores + skipped, kKeyTile,
              scratch.tile + skipped * (n + kPadding), n + kPadding, seen.high - seen.low}, rows, n,
             tile + 1 < item.end_tile() ? keys_or_values(call, item, next, true) : Prefetcher());
}

inline void attend_split(const Call& call, const Item& item, int64_t split, const Scratch& scratch) {
    scratch.split.clear(item.queries * call.group, call.shape.head_size);
    for (int64_t tile = item.first_tile(call.features, split); tile < item.end_tile(split); ++tile)
        attend_tile(call, item, tile, scratch);
}

inline void finish(const Call& call, const Item& item, const Part& whole) {
    for (int64_t row = 0; row < item.queries * call.group; ++row) {
        const float total = whole.running[row].sum;  // 0: the row sees no key
        call.types.store_row(call, item.token + row / call.group, item.head * call.group + row % call.group,
                             whole.out + row * call.shape.head_size, total == 0.0f ? 0.0f : 1.0f / total);
    }
}

// Who computes what: the splits of all items, laid end to end by cost, are cut into one piece for each worker. The parts
// of an item that a cut goes through are kept, and merged by the worker of its last split when all workers are done.
struct Schedule {
    int64_t total = 0, workers = 1;

    int64_t worker_of(int64_t at) const {
        int64_t worker = at * workers / total;
        while (at >= total * (worker + 1) / workers) ++worker;
        return worker;
    }
};

// Calls body(item, first split's worker, last split's worker, cost before the item).
template <class Body>
inline void for_each_scheduled(const Call& call, const Schedule& schedule, Body body) {
    int64_t at = 0;
    for_each_item(call, [&](const Item& item) {
        const int64_t begin = at;
        int64_t last = at;
        for (int64_t split = item.first_split(call.features); split < item.end_split(call.features); ++split) {
            last = at;
            at += cost(call, item, split);
        }
        body(item, schedule.worker_of(begin), schedule.worker_of(last), begin);
    });
}

struct Memory {
    Float32* scratch;     // one for each worker
    Float32** parts;      // [workers]: the parts of the cut item whose last split is the worker's
    int64_t scratch_floats, rows;
};

inline int64_t item_rows(const Call& call, const Item& item) { return item.queries * call.group; }

inline Part cut_part(const Call& call, const Item& item, const Memory& memory, int64_t worker, int64_t split) {
    const int64_t rows = item_rows(call, item), n = call.shape.head_size;
    return part_at(memory.parts[worker] + (split - item.first_split(call.features)) * part_floats(rows, n), rows, n);
}

inline void run_worker(const Call& call, const Schedule& schedule, const Memory& memory, int64_t worker) {
    const int64_t n = call.shape.head_size;
    for_each_scheduled(call, schedule, [&](const Item& item, int64_t first, int64_t last, int64_t at) {
        if (worker < first || worker > last) return;
        const int64_t rows = item_rows(call, item);
        Scratch scratch(memory.scratch + worker * memory.scratch_floats, memory.rows, n);
        call.types.load_queries(scratch.queries, call, item);
        scratch.whole.clear(rows, n);
        for (int64_t split = item.first_split(call.features); split < item.end_split(call.features); ++split) {
            const bool mine = schedule.worker_of(at) == worker;
            at += cost(call, item, split);
            if (!mine) continue;
            if (first != last) scratch.split = cut_part(call, item, memory, last, split);
            attend_split(call, item, split, scratch);
            if (first == last) scratch.whole.add(scratch.split, rows, n);
        }
        if (first == last) finish(call, item, scratch.whole);
    });
}

inline void merge_cut(const Call& call, const Schedule& schedule, const Memory& memory, int64_t worker) {
    const int64_t n = call.shape.head_size;
    for_each_scheduled(call, schedule, [&](const Item& item, int64_t first, int64_t last, int64_t) {
        if (first == last || last != worker) return;
        const int64_t rows = item_rows(call, item);
        const Scratch scratch(memory.scratch + worker * memory.scratch_floats, memory.rows, n);
        scratch.whole.clear(rows, n);
        for (int64_t split = item.first_split(call.features); split < item.end_split(call.features); ++split)
            scratch.whole.add(cut_part(call, item, memory, worker, split), rows, n);
        finish(call, item, scratch.whole);
    });
}

inline void run(const Call& call, const Schedule& schedule, const Memory& memory) {
    if (schedule.workers == 1) return run_worker(call, schedule, memory, 0);
#pragma omp parallel for schedule(static, 1)
    for (int64_t worker = 0; worker < schedule.workers; ++worker) run_worker(call, schedule, memory, worker);
#pragma omp parallel for schedule(static, 1)
    for (int64_t worker = 0; worker < schedule.workers; ++worker) merge_cut(call, schedule, memory, worker);
}

inline int64_t max_threads() {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

// Takes the memory that the schedule needs, runs, and gives it back.
inline int64_t plan_and_run(const Call& call) {
    const int64_t n = call.shape.head_size;
    Schedule schedule;
    Memory memory{nullptr, nullptr, 0, 0};
    for_each_item(call, [&](const Item& item) {
        memory.rows = larger_of(memory.rows, item_rows(call, item));
        for (int64_t split = item.first_split(call.features); split < item.end_split(call.features); ++split)
            schedule.total += cost(call, item, split);
    });
    if (schedule.total == 0) return 0;
    if (schedule.total * kKeyTile * n >= kParallelCost) schedule.workers = max_threads();
    memory.scratch_floats = Scratch::floats(memory.rows, n);

    int64_t floats = schedule.workers * memory.scratch_floats;
    if (schedule.workers > 1)
        for_each_scheduled(call, schedule, [&](const Item& item, int64_t first, int64_t last, int64_t) {
            const int64_t splits = item.end_split(call.features) - item.first_split(call.features);
            if (first != last) floats += splits * part_floats(item_rows(call, item), n);
        });
    const size_t pointers = static_cast<size_t>(schedule.workers) * sizeof(Float32*);
    const size_t bytes = (static_cast<size_t>(floats) * sizeof(Float32) + pointers + 63) / 64 * 64;
    memory.scratch = static_cast<Float32*>(std::aligned_alloc(64, bytes));
    if (!memory.scratch) return kNoMemory;
    memory.parts = reinterpret_cast<Float32**>(memory.scratch + floats);
    Float32* next = memory.scratch + schedule.workers * memory.scratch_floats;
    if (schedule.workers > 1)
        for_each_scheduled(call, schedule, [&](const Item& item, int64_t first, int64_t last, int64_t) {
            if (first == last) return;
            memory.parts[last] = next;
            next += (item.end_split(call.features) - item.first_split(call.features)) *
                    part_floats(item_rows(call, item), n);
        });
    run(call, schedule, memory);
    std::free(memory.scratch);
    return 0;
}

// 1 + the first request whose description points outside the batch or the cache; 0 if none does.
inline int64_t find_bad_request(const Call& call) {
    const Batch& batch = call.batch;
    const int64_t size = call.shape.block_size;
    if (batch.starts[0] < 0 || batch.starts[batch.requests] > batch.tokens) return batch.requests + 1;
    for (int64_t r = 0; r < batch.requests; ++r) {
        const int64_t count = batch.starts[r + 1] - batch.starts[r], length = batch.lengths[r];
        if (count < 0 || length < 0 || length > batch.table_width * size) return r + 1;
        if (count == 0) continue;
        const Item all{r, 0, 0, count, length - count};
        const int32_t* table = batch.tables + r * batch.table_width;
        for (int64_t i = all.first_key(call.features) / size; i * size < length; ++i)
            if (table[i] < 0 || table[i] >= call.shape.num_blocks) return r + 1;
    }
    return 0;
}

inline void clear_rows_of_no_request(const Call& call, int64_t element_bytes) {
    const int64_t row = call.shape.heads * call.group * call.shape.head_size * element_bytes;
    const int64_t begin = call.batch.starts[0], end = call.batch.starts[call.batch.requests];
    char* out = static_cast<char*>(call.out);
    __builtin_memset(out, 0, static_cast<size_t>(begin * row));
    __builtin_memset(out + end * row, 0, static_cast<size_t>((call.batch.tokens - end) * row));
}

}  // namespace

// Returns 0, 1 + the number of a request that is out of bounds (nothing is computed then), or a negative error.
int64_t paged_attention(void* out, const void* q, const void* k_cache, const void* v_cache, const int32_t* starts,
                        const int32_t* lengths, const int32_t* tables, const float* slopes, int64_t tokens,
                        int64_t requests, int64_t table_width, int64_t q_heads, int64_t token_stride,
                        int64_t head_stride, int64_t num_blocks, int64_t heads, int64_t block_size, int64_t head_size,
                        int64_t window, float scale, float soft_cap, int64_t dtype, int64_t cache_dtype) {
    return with_dtype(dtype, [&](auto t) {
        return with_cache_dtype(cache_dtype, [&](auto c) {
            using T = decltype(t);
            using C = decltype(c);
            const Call call{out, q, k_cache, v_cache,
                            {starts, lengths, tables, tokens, requests, table_width},
                            {num_blocks, heads, block_size, head_size},
                            q_heads / heads, token_stride, head_stride, scale * kLog2E,
                            {window, soft_cap * kLog2E, slopes},
                            {sizeof(C), static_cast<int64_t>(sizeof(C)) * (head_size + kScaleElements<C>), load_keys<C>, load_values<C>, load_queries<T>, store_row<T>}};
            if (const int64_t bad = find_bad_request(call)) return bad;
            clear_rows_of_no_request(call, sizeof(T));
            return plan_and_run(call);
        });
    });
}

}}  // namespace quire::QUIRE_ISA
