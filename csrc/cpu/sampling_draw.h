// SPDX-License-Identifier: Apache-2.0
// The draw of one token out of those that top-k and top-p have left.

#pragma once

#include "sampling_select.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Inverse transform sampling over the tokens up to a key of the order, in the order of ids.
class Draw {
public:
    Draw(const Shaped& row, uint64_t last)
        : row_(row), last_value_(last ? value_of(last) : -kInfinity), last_id_(last ? id_of(last) : row.size),
          block_size_((row.size + kBlocks * kLanes - 1) / (kBlocks * kLanes) * kLanes) {}

    int64_t choose(double uniform) const {
        double sums[kBlocks];
        double total = 0.0;
        int64_t num_blocks = 0;
        for (int64_t start = 0; start < row_.size; start += block_size_) total += sums[num_blocks++] = block_sum(start);
        const double target = uniform * total;
        double before = 0.0;
        int64_t block = 0;
        while (block + 1 < num_blocks && !(before + sums[block] > target)) before += sums[block++];
        return choose_in_block(block * block_size_, target - before);
    }

private:
    static constexpr int64_t kBlocks = 256;

    int64_t length(int64_t start) const { return std::min(block_size_, row_.size - start); }

    // Of the lanes at `at`, those of kept tokens.
    Ints kept(Vec y, int64_t at) const { return (y > last_value_) | ((y == last_value_) & ids_below(at, last_id_ + 1)); }

    double block_sum(int64_t start) const {
        Sums sums;
        for_each_vector(length(start), [&](int64_t i, auto lanes) {
            const Vec y = row_.load(start + i, lanes);
            const Ints mask = kept(y, start + i);
            if (any(mask)) sums.add(masked(weight_of(y - row_.best), mask));
        });
        return sums.total();
    }

    // The first token of a block past whose weight the sum exceeds the target; the last possible one if rounding
    // keeps the sum from it.
    int64_t choose_in_block(int64_t start, double target) const {
        double sum = 0.0;
        int64_t chosen = start;
        bool done = false;
        for_each_vector(length(start), [&](int64_t i, auto lanes) {
            if (done) return;
            const Vec y = row_.load(start + i, lanes);
            const Vec weights = masked(weight_of(y - row_.best), kept(y, start + i));
            for (int64_t lane = 0; lane < kLanes && !done; ++lane) {
                if (weights[lane] <= 0.0f) continue;
                chosen = start + i + lane;
                sum += static_cast<double>(weights[lane]);
                done = sum > target;
            }
        });
        return chosen;
    }

    const Shaped& row_;
    float last_value_;
    int64_t last_id_;
    int64_t block_size_;
};

}}}  // namespace quire::QUIRE_ISA
