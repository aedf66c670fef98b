// Asking memory for the next tile while the present one is computed with.
//
// Blocks lie anywhere, so the processor cannot foresee them, and a burst of requests would only queue up: a tile's cache
// lines are asked for a few at a time, between the blocks of a product. Nothing is read, so no result depends on it.

#pragma once

#include "kernels.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kLineBytes = 64;

// The keys, or the values, of some positions of a request and one head.
struct CachedRange {
    const char* cache;     // block 0 of this head
    int64_t block_stride;  // bytes from a block of this head to the next
    int64_t rows, unit;    // a block's memory is [rows][block size] units of bytes
    const int32_t* table;
    int64_t block_size, low, high;

    int64_t lines() const { return (high - low) * rows * unit / kLineBytes; }
};

class Prefetcher {
public:
    Prefetcher() : range_{} {}
    explicit Prefetcher(const CachedRange& range) : range_(range) {}

    int64_t lines() const { return range_.lines(); }

    void ask(int64_t lines) {
        for (; lines > 0; --lines) {
            if (rows_left_ == 0 && !next_block()) return;
            __builtin_prefetch(row_ + offset_, 0, 2);
            offset_ += kLineBytes;
            if (offset_ < row_bytes_) continue;
            offset_ = 0;
            row_ += range_.block_size * range_.unit;
            --rows_left_;
        }
    }

private:
    bool next_block() {
        CachedRange& r = range_;
        if (r.low >= r.high) return false;
        const int64_t size = r.block_size, first = r.low % size;
        const int64_t stop = r.high - r.low < size - first ? first + r.high - r.low : size;
        row_ = r.cache + r.table[r.low / size] * r.block_stride + first * r.unit;
        // A whole block is one piece of memory.
        rows_left_ = stop - first == size ? 1 : r.rows;
        row_bytes_ = (stop - first == size ? r.rows * size : stop - first) * r.unit;
        r.low += stop - first;
        return true;
    }

    CachedRange range_;
    const char* row_ = nullptr;
    int64_t offset_ = 0, row_bytes_ = 0, rows_left_ = 0;
};

}}}  // namespace quire::QUIRE_ISA
