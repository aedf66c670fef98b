// Packing weights into panels once, while loading, and reading rows back out of them.

#include <cstddef>

#include "memory.h"
#include "panels.h"

namespace quire { namespace QUIRE_ISA { namespace {

template <class T>
inline void pack_floats(T* out, const T* rows, const Weight& to, int64_t panel) {
    const int64_t count = to.count(panel);
    const T* from = rows + to.row(panel) * to.inputs;
    for (int64_t k = 0; k < to.inputs; ++k) {
        for (int64_t j = 0; j < kPanel; ++j) out[place(k, j, T{})] = j < count ? from[j * to.inputs + k] : T{};
    }
}

// Row after row: a pair of k is a word, and the words of a panel stay in the first-level cache.
inline void pack_floats(BFloat16* out, const BFloat16* rows, const Weight& to, int64_t panel) {
    const int64_t pairs = to.inputs / 2, count = to.count(panel);
    const auto put = [&](int64_t k, int64_t j, uint32_t word) { __builtin_memcpy(out + k * kPanel + 2 * j, &word, sizeof word); };
    for (int64_t j = 0; j < kPanel; ++j) {
        const BFloat16* row = rows + (to.row(panel) + j) * to.inputs;
        for (int64_t pair = 0; pair < pairs; ++pair) {
            uint32_t word = 0;
            if (j < count) __builtin_memcpy(&word, row + 2 * pair, sizeof word);
            put(2 * pair, j, word << 16 | word >> 16);
        }
        if (to.inputs % 2) put(2 * pairs, j, j < count ? static_cast<uint32_t>(row[2 * pairs].bits) << 16 : 0);
    }
}

// To the nearest integer, ties to even, for magnitudes below 2^22.
inline Vec round(Vec x) { return (x + 12582912.0f) - 12582912.0f; }
inline float round(float x) { return __builtin_nearbyintf(x); }

struct Range { float low, high; };

// The least and the greatest of n values and 0; infinite if one of them is no finite number.
template <class T>
inline Range range_of(const T* x, int64_t n) {
    Vec low = {}, high = {}, poison = {};
    for_each_vector(n, [&](int64_t i, auto lanes) {
        const Vec v = load(x + i, lanes);
        low = v < low ? v : low;
        high = v > high ? v : high;
        poison = poison + v * 0.0f;
    });
    Range range = {0.0f, 0.0f};
    for (int64_t j = 0; j < kLanes; ++j) {
        range.low = low[j] < range.low ? low[j] : range.low;
        range.high = high[j] > range.high ? high[j] : range.high;
        if (poison[j] != 0.0f) range.high = __builtin_inff();
    }
    return range;
}

// The scale of values up to `steps` times it. What is not finite comes out as NaN, so that it shows in the sums.
inline float scale_of(float extreme, float steps) {
    return __builtin_isfinite(extreme) ? extreme / steps : __builtin_nanf("");
}

// Calls put(k, q) with q = round(x / scale) held to [low, high]; not at all if the scale is 0 or no number.
template <class T, class Put>
inline void quantize(const T* x, int64_t n, float scale, float low, float high, Put put) {
    if (!(scale < 0.0f || scale > 0.0f)) return;
    for_each_vector(n, [&](int64_t i, auto lanes) {
        Vec q = round(load(x + i, lanes) / scale);
        q = q < low ? splat(low) : q;
        q = q > high ? splat(high) : q;
        for (int64_t j = 0; j < kLanes && i + j < n; ++j) put(i + j, static_cast<int64_t>(q[j]));
    });
}

template <class T>
inline void pack_int8(uint8_t* out, float* scales, const T* rows, const Weight& to, int64_t panel) {
    __builtin_memset(out, kInt8Zero, static_cast<size_t>(to.steps(kInt8) * kStepBytes));
    for (int64_t j = 0; j < kPanel; ++j) scales[j] = 0.0f;
    for (int64_t j = 0; j < to.count(panel); ++j) {
        const T* row = rows + (to.row(panel) + j) * to.inputs;
        const Range range = range_of(row, to.inputs);
        scales[j] = scale_of(range.high > -range.low ? range.high : -range.low, 127.0f);
        quantize(row, to.inputs, scales[j], -127.0f, 127.0f, [&](int64_t k, int64_t q) {
            out[byte_of(k, j, kInt8)] = static_cast<uint8_t>(q + kInt8Zero);
        });
    }
}

// The scale of one group, and its zero point.
struct Steps { BFloat16 scale; float width; int64_t zero; };

inline Steps steps_of(Range range, bool symmetric) {
    const float extreme = range.high >= -range.low ? range.high : range.low;
    const float exact = symmetric ? scale_of(extreme, -8.0f) : scale_of(range.high - range.low, 15.0f);
    Steps steps = {};
    store(&steps.scale, splat(exact), First{1});
    steps.width = to_float(steps.scale);
    steps.zero = symmetric ? 8 : steps.width > 0.0f ? static_cast<int64_t>(round(-range.low / steps.width)) : 0;
    steps.zero = steps.zero > 15 ? 15 : steps.zero;
    return steps;
}

template <class T>
inline void pack_int4(uint8_t* out, BFloat16* scales, uint8_t* zeros, const T* rows, const Weight& to, int64_t panel) {
    __builtin_memset(out, 0, static_cast<size_t>(to.steps(kInt4) * kStepBytes));
    for (int64_t i = 0; i < to.groups() * kPanel; ++i) {
        scales[i] = BFloat16{};
        if (zeros) zeros[i] = 0;
    }
    for (int64_t j = 0; j < to.count(panel); ++j) {
        for (int64_t group = 0; group * to.group < to.inputs; ++group) {
            const int64_t start = group * to.group, left = to.inputs - start, n = left < to.group ? left : to.group;
            const T* x = rows + (to.row(panel) + j) * to.inputs + start;
            const Steps steps = steps_of(range_of(x, n), !zeros);
            scales[group * kPanel + j] = steps.scale;
            if (zeros) zeros[group * kPanel + j] = static_cast<uint8_t>(steps.zero);
            const float low = static_cast<float>(-steps.zero), high = low + 15.0f;
            quantize(x, n, steps.width, low, high, [&](int64_t k, int64_t q) {
                out[byte_of(start + k, j, kInt4)] |= static_cast<uint8_t>((q + steps.zero) << shift_of(start + k));
            });
        }
    }
}

template <class T>
inline int64_t pack_panel(const Weight& to, const T* rows, int64_t panel, int64_t format) {
    void *data = const_cast<void*>(to.data), *scales = const_cast<void*>(to.scales);
    uint8_t* zeros = const_cast<uint8_t*>(to.zeros);
    const int64_t groups = to.groups(), bytes = to.panel_bytes(format);
    switch (format) {
        case kInt8:
            pack_int8(static_cast<uint8_t*>(data) + panel * bytes, static_cast<float*>(scales) + panel * kPanel, rows, to,
                      panel);
            return 0;
        case kInt4:
            pack_int4(static_cast<uint8_t*>(data) + panel * bytes, static_cast<BFloat16*>(scales) + panel * groups * kPanel,
                      zeros ? zeros + panel * groups * kPanel : nullptr, rows, to, panel);
            return 0;
        default:
            pack_floats(reinterpret_cast<T*>(static_cast<uint8_t*>(data) + panel * bytes), rows, to, panel);
            return 0;
    }
}

// Element k of one output; `lane` of `panel`.
inline float element(const Weight& from, int64_t panel, int64_t lane, int64_t k, int64_t format) {
    const int64_t start = panel * from.padded() * kPanel;
    const uint8_t* bytes = static_cast<const uint8_t*>(from.data) + panel * from.steps(format) * kStepBytes;
    switch (format) {
        case kFloat32: return static_cast<const float*>(from.data)[start + place(k, lane, Float32{})];
        case kBFloat16: return to_float(static_cast<const BFloat16*>(from.data)[start + place(k, lane, BFloat16{})]);
        case kFloat16: return to_float(static_cast<const Float16*>(from.data)[start + place(k, lane, Float16{})]);
        case kInt8:
            return static_cast<float>(bytes[byte_of(k, lane, kInt8)] - kInt8Zero) *
                   static_cast<const float*>(from.scales)[panel * kPanel + lane];
        default: {
            const int64_t group = (panel * from.groups() + k / from.group) * kPanel + lane;
            const int32_t zero = from.zeros ? from.zeros[group] : kInt4Zero, q = bytes[byte_of(k, lane, kInt4)];
            return static_cast<float>((q >> shift_of(k) & 15) - zero) *
                   to_float(static_cast<const BFloat16*>(from.scales)[group]);
        }
    }
}

}  // namespace

int64_t pack_weight(void* data, void* scales, void* zeros, const void* rows, int64_t outputs, int64_t inputs,
                    int64_t halves, int64_t group, int64_t dtype, int64_t format) {
    if (format > kFloat16 && format != kInt8 && format != kInt4) return -1;
    return with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        const Weight to = {data, scales, static_cast<uint8_t*>(zeros), outputs, inputs, halves, group};
        prefer_huge_pages(data, to.panels() * to.panel_bytes(format));
        share(to.panels(), kElementWork * outputs * inputs,
              [&](int64_t panel) { pack_panel(to, static_cast<const T*>(rows), panel, format); });
        return int64_t{0};
    });
}

// Returns how many ids are outside the table; their rows are left as they were.
int64_t packed_embedding(void* out, const int64_t* ids, const void* data, const void* scales, const void* zeros,
                         int64_t count, int64_t outputs, int64_t inputs, int64_t halves, int64_t group, int64_t format) {
    if (format < kFloat32 || format > kInt4) return -1;
    const Weight from = {data, scales, static_cast<const uint8_t*>(zeros), outputs, inputs, halves, group};
    Refusals refused;
    share(count, kElementWork * count * inputs, [&](int64_t i) {
        if (ids[i] < 0 || ids[i] >= outputs) return refused.add();
        const int64_t half = from.half(), n = ids[i] % half, panel = n / kPanel * halves + ids[i] / half;
        float* row = static_cast<float*>(out) + i * inputs;
        for (int64_t k = 0; k < inputs; ++k) row[k] = element(from, panel, n % kPanel, k, format);
    });
    return refused.count();
}

}}  // namespace quire::QUIRE_ISA
