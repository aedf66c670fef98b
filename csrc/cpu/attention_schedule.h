// Who computes what: the splits of all items, laid end to end by cost, are cut into one stretch for each worker. The parts of
// an item that a cut goes through are kept, and merged by the worker of its last split when all workers are done.
//
// A split starts from nothing and is merged, in order, into the splits before it, always, whether or not they ran on different
// threads. So the number of threads changes no bit.

#pragma once

#include "attention_tile.h"

#include <cstdlib>

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kStretchWork = 1 << 15;    // multiply-adds for which a stretch of its own is worth the merging
constexpr int64_t kStretchesPerThread = 4;  // at most, for threads are not equally fast
constexpr int64_t kNoMemory = -2;

// Even, so that pointers may follow.
inline int64_t part_floats(int64_t rows, int64_t n) { return rows * (row_floats(n) + 2); }

inline Part part_at(Float32* memory, int64_t rows, int64_t n) {
    return {memory, reinterpret_cast<Running*>(memory + rows * row_floats(n))};
}

inline int64_t tile_floats(int64_t n) { return larger_of(n * kTileStride, kKeyTile * (row_floats(n) + kPadding)); }

inline int64_t scratch_floats(int64_t rows, int64_t n) {
    return round_up(tile_floats(n) + kKeyTile + rows * (kKeyTile + n + 1) + 2 * part_floats(rows, n), kPadding);
}

inline Scratch scratch_at(Float32* memory, int64_t rows, int64_t n) {
    Scratch s;
    const auto take = [&memory](int64_t floats) { return (memory += floats) - floats; };
    s.tile = take(tile_floats(n));
    s.scales = take(kKeyTile);
    s.scores = take(rows * kKeyTile);
    s.split = part_at(take(part_floats(rows, n)), rows, n);
    s.whole = part_at(take(part_floats(rows, n)), rows, n);
    s.queries = take(rows * n);
    s.factors = reinterpret_cast<float*>(take(rows));
    return s;
}

struct Schedule {
    int64_t total = 0, workers = 1;

    // In multiply-adds: those of a row with a tile's keys, and with its values.
    int64_t work(const Call& call) const { return total * 2 * kKeyTile * call.shape.head_size; }

    void choose_workers(const Call& call) {
        const int64_t threads = team_threads(), most = threads * kStretchesPerThread;
        if (threads > 1) workers = larger_of(1, smaller_of(most, work(call) / kStretchWork));
    }

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
    Float32* scratch;  // one for each worker
    Float32** parts;   // [workers]: the parts of the cut item whose last split is the worker's
    int64_t rows;      // of the largest item
    int64_t cut_floats;  // of all parts that are kept

    Scratch of(const Call& call, int64_t worker) const {
        const int64_t n = call.shape.head_size;
        return scratch_at(scratch + worker * scratch_floats(rows, n), rows, n);
    }
    Part cut(const Call& call, const Item& item, int64_t worker, int64_t split) const {
        const int64_t rows = item.rows(call), n = call.shape.head_size;
        return part_at(parts[worker] + (split - item.first_split(call.features)) * part_floats(rows, n), rows, n);
    }
};

inline void attend_split(const Call& call, const Item& item, int64_t split, const Scratch& scratch) {
    scratch.split.clear(item.rows(call), call.shape.head_size);
    for (int64_t tile = item.first_tile(call.features, split); tile < item.end_tile(split); ++tile)
        call.types.attend_tile(call, item, tile, scratch);
}

inline void finish(const Call& call, const Item& item, const Part& whole) {
    for (int64_t row = 0; row < item.rows(call); ++row) {
        const float total = whole.running[row].sum;  // 0: the row sees no key
        call.types.store_row(call, item.token + row / call.group, item.head * call.group + row % call.group,
                             whole.out + row * row_floats(call.shape.head_size), total == 0.0f ? 0.0f : 1.0f / total);
    }
}

inline void run_worker(const Call& call, const Schedule& schedule, const Memory& memory, int64_t worker) {
    const int64_t n = call.shape.head_size;
    Scratch scratch = memory.of(call, worker);
    const Part own = scratch.split;
    for_each_scheduled(call, schedule, [&](const Item& item, int64_t first, int64_t last, int64_t at) {
        if (worker < first || worker > last) return;
        call.types.load_queries(scratch.queries, call, item);
        scratch.whole.clear(item.rows(call), n);
        for (int64_t split = item.first_split(call.features); split < item.end_split(call.features); ++split) {
            const bool mine = schedule.worker_of(at) == worker;
            at += cost(call, item, split);
            if (!mine) continue;
            scratch.split = first == last ? own : memory.cut(call, item, last, split);
            attend_split(call, item, split, scratch);
            if (first == last) scratch.whole.add(scratch.split, item.rows(call), n);
        }
        if (first == last) finish(call, item, scratch.whole);
    });
}

inline void merge_cut(const Call& call, const Schedule& schedule, const Memory& memory, int64_t worker) {
    const int64_t n = call.shape.head_size;
    for_each_scheduled(call, schedule, [&](const Item& item, int64_t first, int64_t last, int64_t) {
        if (first == last || last != worker) return;
        const Part whole = memory.of(call, worker).whole;
        whole.clear(item.rows(call), n);
        for (int64_t split = item.first_split(call.features); split < item.end_split(call.features); ++split)
            whole.add(memory.cut(call, item, worker, split), item.rows(call), n);
        finish(call, item, whole);
    });
}

inline void run(const Call& call, const Schedule& schedule, const Memory& memory) {
    share(schedule.workers, schedule.work(call), [&](int64_t worker) { run_worker(call, schedule, memory, worker); });
    if (memory.cut_floats == 0) return;
    share(schedule.workers, memory.cut_floats * kElementWork,
          [&](int64_t worker) { merge_cut(call, schedule, memory, worker); });
}

// Calls body(worker of the last split, floats) for each item that a cut goes through.
template <class Body>
inline void for_each_cut(const Call& call, const Schedule& schedule, Body body) {
    if (schedule.workers == 1) return;
    for_each_scheduled(call, schedule, [&](const Item& item, int64_t first, int64_t last, int64_t) {
        const int64_t splits = item.end_split(call.features) - item.first_split(call.features);
        if (first != last) body(last, splits * part_floats(item.rows(call), call.shape.head_size));
    });
}

// Takes the memory that the schedule needs, runs, and gives it back.
inline int64_t plan_and_run(const Call& call) {
    const int64_t n = call.shape.head_size;
    Schedule schedule;
    Memory memory{nullptr, nullptr, 0, 0};
    for_each_item(call, [&](const Item& item) {
        memory.rows = larger_of(memory.rows, item.rows(call));
        for (int64_t split = item.first_split(call.features); split < item.end_split(call.features); ++split)
            schedule.total += cost(call, item, split);
    });
    if (schedule.total == 0) return 0;
    schedule.choose_workers(call);

    const int64_t own = schedule.workers * scratch_floats(memory.rows, n);
    for_each_cut(call, schedule, [&](int64_t, int64_t needed) { memory.cut_floats += needed; });
    const int64_t floats = own + memory.cut_floats;
    const int64_t bytes = floats * static_cast<int64_t>(sizeof(Float32)) +
                          schedule.workers * static_cast<int64_t>(sizeof(Float32*));
    memory.scratch = static_cast<Float32*>(std::aligned_alloc(64, static_cast<size_t>(round_up(bytes, 64))));
    if (!memory.scratch) return kNoMemory;
    memory.parts = reinterpret_cast<Float32**>(memory.scratch + floats);
    Float32* next = memory.scratch + own;
    for_each_cut(call, schedule, [&](int64_t worker, int64_t needed) { memory.parts[worker] = next, next += needed; });
    run(call, schedule, memory);
    std::free(memory.scratch);
    return 0;
}

}}}  // namespace quire::QUIRE_ISA
