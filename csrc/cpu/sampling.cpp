// The tail of sampling: logits in, one token per row out, without a copy of the vocabulary and without sorting it.
//
// A row is one thread's work and its sums run in an order that its length and its values alone decide. Weights are
// exp(y - max) in float32; what is added up is added in float64.

#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace quire { namespace QUIRE_ISA { namespace {

typedef double Doubles __attribute__((vector_size(32)));

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMaxLogit = std::numeric_limits<float>::max();
// Below this many nats under the best token, exp() is held up; such a token counts as impossible.
constexpr float kNegligible = -87.0f;

inline bool any(Ints mask) {
#ifdef __AVX2__
    return !_mm256_testz_si256(reinterpret_cast<__m256i>(mask), reinterpret_cast<__m256i>(mask));
#else
    int32_t all = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) all |= mask[lane];
    return all != 0;
#endif
}

// Whether each of the lanes at `at` has an id below a bound; ids fit in 32 bits.
inline Ints ids_below(int64_t at, int64_t bound) {
    return Ints{0, 1, 2, 3, 4, 5, 6, 7} + static_cast<int32_t>(at) < static_cast<int32_t>(bound);
}

// Eight running sums in float64, a lane each.
class Sums {
public:
    void add(Vec v) {
#ifdef __AVX2__
        const __m256 lanes = reinterpret_cast<__m256>(v);
        low_ += reinterpret_cast<Doubles>(_mm256_cvtps_pd(_mm256_castps256_ps128(lanes)));
        high_ += reinterpret_cast<Doubles>(_mm256_cvtps_pd(_mm256_extractf128_ps(lanes, 1)));
#else
        low_ += Doubles{v[0], v[1], v[2], v[3]};
        high_ += Doubles{v[4], v[5], v[6], v[7]};
#endif
    }

    // One fixed tree, as for float32.
    double total() const {
        const Doubles halves = low_ + high_;
        return (halves[0] + halves[2]) + (halves[1] + halves[3]);
    }

private:
    Doubles low_ = {}, high_ = {};
};

inline Vec masked(Vec v, Ints mask) { return as_floats(as_bits(v) & reinterpret_cast<Bits>(mask)); }

// Lanes past the row's end read as a token that is not there.
inline Vec load_logits(const float* p, All) { return load(reinterpret_cast<const Float32*>(p), All{}); }

inline Vec load_logits(const float* p, First lanes) {
    Vec v = splat(-kInfinity);
    for (int64_t i = 0; i < lanes.count; ++i) v[i] = p[i];
    return v;
}

inline float max_of(const float* x, int64_t n) {
    Vec best[4] = {splat(-kInfinity), splat(-kInfinity), splat(-kInfinity), splat(-kInfinity)};
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        for (int64_t j = 0; j < 4; ++j) {
            const Vec v = load_logits(x + i + j * kLanes, All{});
            best[j] = v > best[j] ? v : best[j];
        }
    }
    for_each_vector(n - i, [&](int64_t at, auto lanes) {
        const Vec v = load_logits(x + i + at, lanes);
        best[0] = v > best[0] ? v : best[0];
    });
    float result = -kInfinity;
    for (const Vec& v : best) {
        for (int64_t lane = 0; lane < kLanes; ++lane) result = v[lane] > result ? v[lane] : result;
    }
    return result;
}

// The lowest index of a value that is in the row.
inline int64_t first_equal(const float* x, int64_t n, float value) {
    int64_t i = 0;
    while (i + kLanes <= n && !any(load_logits(x + i, All{}) == splat(value))) i += kLanes;
    while (x[i] != value) ++i;
    return i;
}

// exp(y) for y <= 0, and 0 where that is negligible.
inline Vec weight_of(Vec y) { return masked(exp(y), y > splat(kNegligible)); }

// Integers in the order of tokens: the higher value first and, of equal values, the lower id first.
inline uint64_t key_of(float value, int64_t id) {
    uint32_t bits;
    const float canonical = value + 0.0f;  // -0.0 becomes 0.0
    std::memcpy(&bits, &canonical, sizeof bits);
    const uint32_t monotonic = bits & 0x80000000 ? ~bits : bits | 0x80000000;
    return static_cast<uint64_t>(monotonic) << 32 | (0xffffffff - static_cast<uint32_t>(id));
}

inline int64_t id_of(uint64_t key) { return 0xffffffff - static_cast<uint32_t>(key); }

inline float value_of(uint64_t key) {
    const uint32_t monotonic = static_cast<uint32_t>(key >> 32);
    const uint32_t bits = monotonic & 0x80000000 ? monotonic & 0x7fffffff : ~monotonic;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// In an anonymous namespace, so that what the standard library makes of it is not shared between instruction sets.
struct Later {
    bool operator()(uint64_t a, uint64_t b) const { return a > b; }
};

// A buffer of one call; memory that is not there ends the process, as it would with exceptions off anyway.
template <class T>
class Buffer {
public:
    explicit Buffer(int64_t size) : data_(static_cast<T*>(std::malloc(static_cast<size_t>(size + 1) * sizeof(T)))) {
        if (!data_) std::abort();
    }
    ~Buffer() { std::free(data_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    T* data() { return data_; }

private:
    T* data_;
};

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

// A prefix of the order of tokens: its last key, and what it holds.
struct Prefix {
    uint64_t last = 0;
    Amount held;
};

// Finds the shortest prefix of the order of tokens that reaches a limit: a histogram over the distance to the best
// token tells in which bin it ends, and only that bin's tokens are looked at more closely.
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
    static constexpr int64_t kCopies = 2;  // so that neighbours of one bin need not wait for each other
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

// The last key that top-k and then top-p, of the mass that top-k left, keep.
inline uint64_t last_kept(const Shaped& row, int64_t top_k, double top_p) {
    if (top_k >= row.size && top_p >= 1.0) return 0;
    constexpr double kNoLimit = std::numeric_limits<double>::infinity();
    const Selection selection(row);
    Prefix prefix{0, selection.total()};
    if (top_k < row.size) prefix = selection.first({top_k, kNoLimit});
    if (top_p < 1.0) prefix = selection.first({top_k, top_p * prefix.held.mass});
    return prefix.last;
}

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

// What a row asks for: a row of the settings that callers pass.
struct Settings {
    double temperature, log_min_p, top_k, top_p;
};

inline int64_t sample_row(const float* logits, int64_t n, const Settings& settings, double uniform) {
    const float best = max_of(logits, n);
    if (best == -kInfinity) return -1;
    if (settings.temperature == 0.0) return first_equal(logits, n, best);
    const Shaped row(logits, n, best, static_cast<float>(settings.temperature), static_cast<float>(settings.log_min_p));
    if (row.best == -kInfinity) return -1;
    return Draw(row, last_kept(row, static_cast<int64_t>(settings.top_k), settings.top_p)).choose(uniform);
}

inline bool is_finite(const float* x, int64_t n) {
    Ints bad = {};
    for_each_vector(n, [&](int64_t i, auto lanes) {
        const Bits exponent = as_bits(load(reinterpret_cast<const Float32*>(x) + i, lanes)) & 0x7f800000;
        bad |= exponent == 0x7f800000;
    });
    return !any(bad);
}

constexpr int64_t kFewBest = 64;

// The keys of the first few tokens, in order; one insertion for each token that was among the best so far.
inline void few_best(const float* x, int64_t n, uint64_t* keys, int64_t count) {
    std::fill(keys, keys + count, uint64_t{0});
    float threshold = -kInfinity;
    for_each_vector(n, [&](int64_t at, auto lanes) {
        const Vec v = load_logits(x + at, lanes);
        if (!any(v > threshold)) return;
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            if (!(v[lane] > threshold)) continue;
            const uint64_t key = key_of(v[lane], at + lane);
            int64_t place = count - 1;
            for (; place > 0 && keys[place - 1] < key; --place) keys[place] = keys[place - 1];
            keys[place] = key;
            if (keys[count - 1]) threshold = value_of(keys[count - 1]);
        }
    });
}

inline void many_best(const float* x, int64_t n, uint64_t* keys, int64_t count) {
    for (int64_t id = 0; id < n; ++id) keys[id] = key_of(x[id], id);
    if (count < n) std::nth_element(keys, keys + count, keys + n, Later{});
    std::sort(keys, keys + count, Later{});
}

struct LogSum {
    double log_total;  // ln of the sum of e^(x - best)
    int64_t rank;  // of the chosen token, from 1
};

inline LogSum log_sum(const float* x, int64_t n, float best, int64_t chosen) {
    Sums sums;
    Ints counts = {};
    for_each_vector(n, [&](int64_t at, auto lanes) {
        const Vec v = load_logits(x + at, lanes);
        sums.add(weight_of(v - best));
        counts -= (v > x[chosen]) | ((v == x[chosen]) & ids_below(at, chosen));
    });
    int64_t rank = 1;
    for (int64_t lane = 0; lane < kLanes; ++lane) rank += counts[lane];
    return {std::log(sums.total()), rank};
}

// Ids and logprobs of the chosen token and then of the first `num_top`.
inline void logprobs_row(const float* x, int64_t n, int64_t chosen, int64_t num_top, int64_t* ids, float* logprobs,
                         int64_t* rank) {
    const int64_t count = std::max<int64_t>(num_top, 1);
    Buffer<uint64_t> buffer(count <= kFewBest ? count : n);
    uint64_t* keys = buffer.data();
    count <= kFewBest ? few_best(x, n, keys, count) : many_best(x, n, keys, count);
    const float best = value_of(keys[0]);
    const LogSum sum = log_sum(x, n, best, chosen);
    *rank = sum.rank;
    for (int64_t i = 0; i <= num_top; ++i) {
        // Logits that are not finite leave keys unset; what is said of them is void, but within the row.
        ids[i] = i && keys[i - 1] ? id_of(keys[i - 1]) : chosen;
        logprobs[i] = static_cast<float>(static_cast<double>(x[ids[i]]) - static_cast<double>(best) - sum.log_total);
    }
}

// Philox4x32-10 of J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): the highest 52 bits of
// the first two words of counter (position, 0) and key seed, as a number in [0, 1).
inline double philox_uniform_of(uint64_t seed, uint64_t position) {
    uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t first = uint64_t{0xd2511f53} * counter[0], second = uint64_t{0xcd9e8d57} * counter[2];
        counter[0] = static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key[0];
        counter[1] = static_cast<uint32_t>(second);
        counter[2] = static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key[1];
        counter[3] = static_cast<uint32_t>(first);
        key[0] += 0x9e3779b9;
        key[1] += 0xbb67ae85;
    }
    const uint64_t bits = static_cast<uint64_t>(counter[0]) << 20 | counter[1] >> 12;
    return static_cast<double>(bits) * 0x1p-52;
}

}  // namespace

int64_t non_finite_rows(void* out, const void* logits, int64_t rows, int64_t n) {
    const float* x = static_cast<const float*>(logits);
#pragma omp parallel for schedule(static) if (rows > 1 && rows * n >= kParallelElements)
    for (int64_t row = 0; row < rows; ++row) static_cast<bool*>(out)[row] = !is_finite(x + row * n, n);
    return 0;
}

int64_t sample_tokens(void* out, const void* logits, const void* settings, const void* uniforms, int64_t rows,
                      int64_t n) {
    const float* x = static_cast<const float*>(logits);
#pragma omp parallel for schedule(dynamic) if (rows > 1 && rows * n >= kParallelElements)
    for (int64_t row = 0; row < rows; ++row) {
        const double uniform = static_cast<const double*>(uniforms)[row];
        static_cast<int64_t*>(out)[row] = sample_row(x + row * n, n, static_cast<const Settings*>(settings)[row], uniform);
    }
    return 0;
}

int64_t token_logprobs(void* ids, void* logprobs, void* ranks, const void* logits, const void* chosen, int64_t rows,
                       int64_t n, int64_t num_top) {
    const float* x = static_cast<const float*>(logits);
    const int64_t* tokens = static_cast<const int64_t*>(chosen);
    int64_t refused = 0;
    for (int64_t row = 0; row < rows; ++row) refused += tokens[row] < 0 || tokens[row] >= n;
    if (refused) return refused;
    const int64_t width = num_top + 1;
#pragma omp parallel for schedule(dynamic) if (rows > 1 && rows * n >= kParallelElements)
    for (int64_t row = 0; row < rows; ++row) {
        logprobs_row(x + row * n, n, tokens[row], num_top, static_cast<int64_t*>(ids) + row * width,
                     static_cast<float*>(logprobs) + row * width, static_cast<int64_t*>(ranks) + row);
    }
    return 0;
}

int64_t philox_uniform(void* out, const void* seeds, const void* positions, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        static_cast<double*>(out)[i] =
            philox_uniform_of(static_cast<const uint64_t*>(seeds)[i], static_cast<const uint64_t*>(positions)[i]);
    }
    return 0;
}

int64_t apply_penalties(void* logits, const void* indices, const void* repetition, const void* subtracted,
                        int64_t count, int64_t size) {
    float* x = static_cast<float*>(logits);
    const int64_t* at = static_cast<const int64_t*>(indices);
    int64_t refused = 0;
    for (int64_t i = 0; i < count; ++i) refused += at[i] < 0 || at[i] >= size;
    if (refused) return refused;
    for (int64_t i = 0; i < count; ++i) {
        const double factor = static_cast<const double*>(repetition)[i], value = static_cast<double>(x[at[i]]);
        const double scaled = (value > 0.0 ? value / factor : value * factor) - static_cast<const double*>(subtracted)[i];
        // Brought back into range, so that a tiny or huge factor makes no infinity.
        x[at[i]] = static_cast<float>(scaled > static_cast<double>(kMaxLogit) ? static_cast<double>(kMaxLogit) : scaled);
    }
    return 0;
}

}}  // namespace quire::QUIRE_ISA
