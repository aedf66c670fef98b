// SPDX-License-Identifier: Apache-2.0
// Plan of attention: the splits of all items, laid end to end by cost, are divided into one stretch for each worker. An item
// in several stretches leaves a part for each of its splits, and these are merged when all workers are done.
//
// Layers of one kind ask for the same plan one after the other, in every step, so a thread keeps the last one.

#pragma once

#include "attention_tile.h"

#include <cstdlib>
#include <cstring>

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kStretchWork = 1 << 15;   // multiply-adds for which a stretch of its own is worth the merging
constexpr int64_t kStretchesPerThread = 4;  // at most, for threads are not equally fast
constexpr int64_t kItemsPerStretch = 8;     // at least, where there are so many rows

// Memory of one thread that grows and is kept.
template <class T>
class Kept {
public:
    Kept() = default;
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;
    ~Kept() { std::free(at_); }

    // False if the system refuses; what stood there stays.
    bool reserve(int64_t count) {
        if (count <= capacity_) return true;
        const int64_t capacity = larger_of(count, 2 * capacity_);
        void* grown = std::realloc(static_cast<void*>(at_), static_cast<size_t>(capacity) * sizeof(T));
        if (!grown) return false;
        at_ = static_cast<T*>(grown), capacity_ = capacity;
        return true;
    }
    T* at() { return at_; }
    const T* at() const { return at_; }
    T& operator[](int64_t i) { return at_[i]; }
    const T& operator[](int64_t i) const { return at_[i]; }

private:
    T* at_ = nullptr;
    int64_t capacity_ = 0;
};

// An item, its share of the whole cost, and the workers of its first and its last split.
struct Planned {
    Item item;
    int64_t begin, first_worker, last_worker;
    int64_t parts;  // where its parts begin, in floats; -1 if no cut goes through it

    bool is_cut() const { return parts >= 0; }
};

// All that a plan depends on.
struct PlanKey {
    int64_t tokens, requests, heads, group, head_size, value_size, window, chunked, ahead, threads;
};

class Plan {
public:
    int64_t total = 0, workers = 1;
    int64_t rows = 0;         // of the largest item
    int64_t parts_floats = 0;  // of all parts

    // Makes this the plan of a call, if it is not yet; false if there is no memory.
    bool serve(const Call& call) {
        const PlanKey key{call.batch.tokens, call.batch.requests, call.shape.heads, call.group, call.shape.head_size,
                          call.value_size, call.features.window, call.features.chunked, call.features.ahead, team_threads()};
        const bool is_reused = !call.features.last_seen;  // which rows see how far is not part of the key
        if (is_reused && is_of(key, call.batch)) return true;
        is_made_ = false;
        if (!remember(key, call.batch) || !make(call)) return false;
        is_made_ = is_reused;
        return true;
    }

    // In multiply-adds: those of a row with a tile's keys, and with its values.
    int64_t work(const Call& call) const { return total * kKeyTile * (call.shape.head_size + call.value_size); }

    int64_t worker_of(int64_t at) const {
        int64_t worker = at * workers / total;
        while (at >= total * (worker + 1) / workers) ++worker;
        return worker;
    }

    // Calls body(planned) for the items of which a worker has splits.
    template <class Body>
    void for_each_of(int64_t worker, Body body) const {
        for (int64_t i = firsts_[worker]; i < count_ && items_[i].first_worker <= worker; ++i) body(items_[i]);
    }

    int64_t cut_items() const { return num_cut_; }
    const Planned& cut_item(int64_t i) const { return items_[cut_[i]]; }

private:
    bool is_of(const PlanKey& key, const Batch& batch) const {
        if (!is_made_ || std::memcmp(&key, &key_, sizeof key)) return false;
        const size_t lengths = static_cast<size_t>(batch.requests) * sizeof(int32_t);
        return !std::memcmp(starts_.at(), batch.starts, lengths + sizeof(int32_t)) &&
               (!lengths || !std::memcmp(lengths_.at(), batch.lengths, lengths));
    }

    bool remember(const PlanKey& key, const Batch& batch) {
        key_ = key;
        if (!starts_.reserve(batch.requests + 1) || !lengths_.reserve(batch.requests + 1)) return false;
        const size_t lengths = static_cast<size_t>(batch.requests) * sizeof(int32_t);
        std::memcpy(starts_.at(), batch.starts, lengths + sizeof(int32_t));
        if (lengths) std::memcpy(lengths_.at(), batch.lengths, lengths);
        return true;
    }

    bool make(const Call& call) {
        if (!list_items(call)) return false;
        workers = 1;
        const int64_t threads = key_.threads;
        if (threads > 1)
            workers = larger_of(1, smaller_of(threads * kStretchesPerThread, work(call) / kStretchWork));
        return total == 0 || assign(call);
    }

    bool list_items(const Call& call) {
        bool fits = true;
        total = rows = count_ = 0;
        for_each_item(call, item_rows(call, key_.threads * kStretchesPerThread * kItemsPerStretch), [&](const Item& item) {
            fits = fits && items_.reserve(count_ + 1);
            if (!fits) return;
            items_[count_++] = Planned{item, total, 0, 0, -1};
            rows = larger_of(rows, item.rows(call));
            for (int64_t split = item.first_split(call.features); split < item.end_split(call.features); ++split)
                total += cost(call, item, split);
        });
        return fits;
    }

    bool assign(const Call& call) {
        if (!firsts_.reserve(workers) || !cut_.reserve(workers)) return false;
        int64_t next = 0;  // of the workers whose first item is not known
        num_cut_ = parts_floats = 0;
        for (int64_t i = 0; i < count_; ++i) {
            Planned& planned = items_[i];
            const Item& item = planned.item;
            const int64_t last = item.end_split(call.features) - 1, splits = last + 1 - item.first_split(call.features);
            const int64_t end = i + 1 < count_ ? items_[i + 1].begin : total;
            planned.first_worker = worker_of(planned.begin);
            planned.last_worker = worker_of(end - cost(call, item, last));
            while (next <= planned.last_worker) firsts_[next++] = i;
            if (planned.first_worker == planned.last_worker) continue;
            planned.parts = parts_floats;
            parts_floats += splits * part_floats(item.rows(call), call.value_size);
            cut_[num_cut_++] = i;
        }
        while (next < workers) firsts_[next++] = count_;
        return true;
    }

    bool is_made_ = false;
    PlanKey key_{};
    int64_t count_ = 0, num_cut_ = 0;
    Kept<int32_t> starts_, lengths_;
    Kept<Planned> items_;
    Kept<int64_t> firsts_, cut_;
};

}}}  // namespace quire::QUIRE_ISA
