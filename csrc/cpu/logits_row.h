// SPDX-License-Identifier: Apache-2.0
// What the kernels of the sampling tail share: walking a row of logits in vectors, sums in float64, and the order of tokens.
//
// A row is one thread's work and its sums run in an order that its length and its values alone decide. Weights are
// exp(y - max) in float32; what is added up is added in float64.

#pragma once

#include "kernels.h"

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

// A buffer of one call, unless the system refuses it: then it has no data.
template <class T>
class Buffer {
public:
    explicit Buffer(int64_t size) : data_(static_cast<T*>(std::malloc(static_cast<size_t>(size + 1) * sizeof(T)))) {}
    ~Buffer() { std::free(data_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    T* data() { return data_; }

private:
    T* data_;
};

}}}  // namespace quire::QUIRE_ISA
