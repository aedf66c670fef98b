// SPDX-License-Identifier: Apache-2.0
// Top-k and top-p: how far down the order of tokens a row's choice goes, found without sorting the vocabulary.

#pragma once

#include "logits_row.h"

#include <algorithm>

namespace quire { namespace QUIRE_ISA { namespace {

// A row's logits after temperature and min-p.
struct Shaped {
    const float* logits;
    int64_t size;
    float temperature;
    float lowest;
    float best;

    Shaped(const float* x, int64_t n, float max_logit, float t, float log_min_p) : logits(x), size(n), temperature(t) {
        const float scaled = max_logit / t;
        best = scaled < kMaxLogit ? scaled : kMaxLogit;
        lowest = best + log_min_p;
    }

    template <class Lanes>
    Vec load(int64_t at, Lanes lanes) const {
        const Vec y = load_logits(logits + at, lanes) / temperature;
        const Vec capped = y > kMaxLogit ? splat(kMaxLogit) : y;
        return capped < lowest ? splat(-kInfinity) : capped;
    }
};

// Number and mass of some tokens.
struct Amount {
    int64_t count = 0;
    double mass = 0.0;

    Amount operator+(const Amount& other) const { return {count + other.count, mass + other.mass}; }
    bool reaches(const Amount& limit) const { return count >= limit.count || mass >= limit.mass; }
};

struct Candidate {
    uint64_t key;
    float weight;
};

struct EarlierCandidate {
    bool operator()(const Candidate& a, const Candidate& b) const { return a.key > b.key; }
};

// A prefix of the order of tokens: its last key, and what it holds; neither is known where there was no memory to find it.
struct Prefix {
    uint64_t last = 0;
    Amount held;
    bool is_known = true;
};

// Finds the shortest prefix of the order of tokens that reaches a limit: a histogram over the distance to the best
// token gives the bin in which it ends, and only that bin's tokens are examined more closely.
class Selection {
public:
    explicit Selection(const Shaped& row) : row_(row) {
        for_each_vector(row.size, [&](int64_t at, auto lanes) {
            const Vec y = row_.load(at, lanes);
            const Ints bins = bins_of(y);
            const Vec weights = weight_of(y - row_.best);
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                Amount& bin = bins_[lane % kCopies][bins[lane]];
                bin.count += 1;
                bin.mass += static_cast<double>(weights[lane]);
            }
        });
        for (int64_t bin = 0; bin < kBins; ++bin) {
            for (int64_t copy = 1; copy < kCopies; ++copy) bins_[0][bin] = bins_[0][bin] + bins_[copy][bin];
            total_ = total_ + bins_[0][bin];
        }
    }

    const Amount& total() const { return total_; }

    Prefix first(const Amount& limit) const {
        Amount before;
        for (int64_t bin = 0; bin < kBins; ++bin) {
            const Amount after = before + bins_[0][bin];
            if (bins_[0][bin].count && after.reaches(limit)) return first_of_bin(bin, before, limit);
            before = after;
        }
        return {0, total_};
    }

private:
    // A bin is 1/8 nat wide; the last one of the row takes all that is further away, and one more what is dropped.
    static constexpr int64_t kBins = 512;
    static constexpr int64_t kCopies = 2;  // so that neighbors of one bin need not wait for each other
    static constexpr int64_t kDigit = 8;
    static constexpr int64_t kFew = 64;

    Ints bins_of(Vec y) const {
        const Vec distance = (row_.best - y) * 8.0f;
        const Vec bounded = distance < float{kBins - 1} ? distance : splat(float{kBins - 1});
        return __builtin_convertvector(distance == kInfinity ? splat(float{kBins}) : bounded, Ints);
    }

    Prefix first_of_bin(int64_t bin, Amount before, const Amount& limit) const {
        Buffer<Candidate> buffer(bins_[0][bin].count);
        Candidate* found = buffer.data();
        if (!found) return {0, {}, false};
        int64_t count = 0;
        for_each_vector(row_.size, [&](int64_t at, auto lanes) {
            const Vec y = row_.load(at, lanes);
            const Ints bins = bins_of(y);
            if (!any(bins == static_cast<int32_t>(bin))) return;
            const Vec weights = weight_of(y - row_.best);
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                if (bins[lane] == bin) found[count++] = {key_of(y[lane], at + lane), weights[lane]};
            }
        });
        while (count > kFew) {
            if (!narrow_down(found, count, before, limit)) break;
        }
        std::sort(found, found + count, EarlierCandidate{});
        for (int64_t i = 0; i < count; ++i) {
            before = before + Amount{1, found[i].weight};
            if (before.reaches(limit)) return {found[i].key, before};
        }
        return {found[count - 1].key, before};  // the bin reached the limit only by rounding
    }

    // Keeps of the candidates those of one value of their highest digit that differs; false if the limit is not among
    // them, which only rounding brings about.
    static bool narrow_down(Candidate* found, int64_t& count, Amount& before, const Amount& limit) {
        uint64_t low = found[0].key, high = found[0].key;
        for (int64_t i = 1; i < count; ++i) {
            low = found[i].key < low ? found[i].key : low;
            high = found[i].key > high ? found[i].key : high;
        }
        const int64_t length = 64 - __builtin_clzll(high - low);
        const int64_t shift = length > kDigit ? length - kDigit : 0;
        Amount bins[1 << kDigit];
        for (int64_t i = 0; i < count; ++i) {
            Amount& bin = bins[(high - found[i].key) >> shift];
            bin = bin + Amount{1, found[i].weight};
        }
        Amount start = before;
        for (uint64_t bin = 0; bin < 1 << kDigit; ++bin) {
            const Amount after = start + bins[bin];
            if (bins[bin].count && after.reaches(limit)) {
                int64_t kept = 0;
                for (int64_t i = 0; i < count; ++i) {
                    if ((high - found[i].key) >> shift == bin) found[kept++] = found[i];
                }
                count = kept;
                before = start;
                return true;
            }
            start = after;
        }
        return false;
    }

    const Shaped& row_;
    Amount bins_[kCopies][kBins + 1];
    Amount total_;
};

// What top-k and then top-p, of the mass that top-k left, keep; all of a row is up to key 0.
inline Prefix kept_prefix(const Shaped& row, int64_t top_k, double top_p) {
    if (top_k >= row.size && top_p >= 1.0) return {};
    constexpr double kNoLimit = std::numeric_limits<double>::infinity();
    const Selection selection(row);
    Prefix prefix{0, selection.total()};
    if (top_k < row.size) prefix = selection.first({top_k, kNoLimit});
    if (top_p < 1.0 && prefix.is_known) prefix = selection.first({top_k, top_p * prefix.held.mass});
    return prefix;
}

}}}  // namespace quire::QUIRE_ISA
