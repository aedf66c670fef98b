// SPDX-License-Identifier: Apache-2.0
// A plan carried out: memory for every worker, their stretches, and the merging of what a cut went through.
//
// A split starts from nothing and is merged, in order, into the splits before it, always, whether or not they ran on different
// threads. So the number of threads changes no bit.

#pragma once

#include "attention_plan.h"

namespace quire { namespace QUIRE_ISA { namespace {

inline Part part_at(Float32* memory, int64_t rows, int64_t n) {
    return {memory, reinterpret_cast<Running*>(memory + rows * row_floats(n))};
}

inline int64_t tile_floats(int64_t n) { return larger_of(n * kTileStride, kKeyTile * (row_floats(n) + kPadding)); }

inline int64_t scratch_floats(const Call& call, int64_t rows) {
    const int64_t n = call.shape.head_size, parts = 2 * part_floats(rows, call.value_size);
    return round_up(tile_floats(n) + kKeyTile + rows * (kKeyTile + 1) + round_up(rows, kPiece) * n + parts, kPadding);
}

inline Scratch scratch_at(const Call& call, Float32* memory, int64_t rows) {
    const int64_t n = call.shape.head_size, value_size = call.value_size;
    Scratch s;
    const auto take = [&memory](int64_t floats) { return (memory += floats) - floats; };
    s.tile = take(tile_floats(n));
    s.scales = take(kKeyTile);
    s.scores = take(rows * kKeyTile);
    s.split = part_at(take(part_floats(rows, value_size)), rows, value_size);
    s.whole = part_at(take(part_floats(rows, value_size)), rows, value_size);
    s.queries = take(round_up(rows, kPiece) * n);
    s.factors = reinterpret_cast<float*>(take(rows));
    return s;
}

struct Memory {
    Float32* scratch;  // one for each worker
    Float32* parts;    // of all items that a cut goes through
    int64_t rows;      // of the largest item

    Scratch of(const Call& call, int64_t worker) const {
        return scratch_at(call, scratch + worker * scratch_floats(call, rows), rows);
    }
    Part part(const Call& call, const Planned& planned, int64_t split) const {
        const int64_t rows = planned.item.rows(call), n = call.value_size;
        const int64_t index = split - planned.item.first_split(call.features);
        return part_at(parts + planned.parts + index * part_floats(rows, n), rows, n);
    }
};

inline void attend_split(const Call& call, const Item& item, int64_t split, const Scratch& scratch) {
    scratch.split.clear(item.rows(call), call.value_size);
    for (int64_t tile = item.first_tile(call.features, split); tile < item.end_tile(call.features, split); ++tile)
        call.types.attend_tile(call, item, tile, scratch);
}

inline void finish(const Call& call, const Item& item, const Part& whole) {
    for (int64_t row = 0; row < item.rows(call); ++row) {
        const int64_t head = item.head * call.group + row % call.group;
        const float* sink = call.features.sinks ? call.features.sinks + head : nullptr;
        call.types.store_row(call, item.token + row / call.group, head, whole.out + row * row_floats(call.value_size),
                             final_factor(whole.running[row], sink));
    }
}

inline void run_worker(const Call& call, const Plan& plan, const Memory& memory, int64_t worker) {
    const int64_t n = call.value_size;
    Scratch scratch = memory.of(call, worker);
    const Part own = scratch.split;
    plan.for_each_of(worker, [&](const Planned& planned) {
        const Item& item = planned.item;
        call.types.load_queries(scratch.queries, call, item);
        scratch.whole.clear(item.rows(call), n);
        int64_t at = planned.begin;
        for (int64_t split = item.first_split(call.features); split < item.end_split(call.features); ++split) {
            const bool mine = !planned.is_cut() || plan.worker_of(at) == worker;
            at += cost(call, item, split);
            if (!mine) continue;
            scratch.split = planned.is_cut() ? memory.part(call, planned, split) : own;
            attend_split(call, item, split, scratch);
            if (!planned.is_cut()) scratch.whole.add(scratch.split, item.rows(call), n);
        }
        if (!planned.is_cut()) finish(call, item, scratch.whole);
    });
}

// The parts of an item into its first.
inline void merge_cut(const Call& call, const Memory& memory, const Planned& planned) {
    const Item& item = planned.item;
    const int64_t first = item.first_split(call.features);
    const Part whole = memory.part(call, planned, first);
    for (int64_t split = first + 1; split < item.end_split(call.features); ++split)
        whole.add(memory.part(call, planned, split), item.rows(call), call.value_size);
    finish(call, item, whole);
}

inline void run(const Call& call, const Plan& plan, const Memory& memory) {
    share(plan.workers, plan.work(call), [&](int64_t worker) { run_worker(call, plan, memory, worker); });
    share(plan.cut_items(), plan.parts_floats * kElementWork,
          [&](int64_t i) { merge_cut(call, memory, plan.cut_item(i)); });
}

// Takes the memory that the plan needs, runs, and gives it back.
inline int64_t plan_and_run(const Call& call) {
    static thread_local Plan plan;
    if (!plan.serve(call)) return kNoMemory;
    if (plan.total == 0) return 0;
    const int64_t own = plan.workers * scratch_floats(call, plan.rows);
    const int64_t bytes = (own + plan.parts_floats) * static_cast<int64_t>(sizeof(Float32));
    const auto memory = static_cast<Float32*>(std::aligned_alloc(64, static_cast<size_t>(round_up(bytes, 64))));
    if (!memory) return kNoMemory;
    run(call, plan, {memory, memory + own, plan.rows});
    std::free(memory);
    return 0;
}

}}}  // namespace quire::QUIRE_ISA
