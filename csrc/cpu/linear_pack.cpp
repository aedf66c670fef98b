// SPDX-License-Identifier: Apache-2.0
// Packing weights into panels once, while loading, and reading rows back out of them.

#include <cstddef>

#include "memory.h"
#include "codes.h"

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

inline Vec within(Vec x, float low, float high) {
    x = x < low ? splat(low) : x;
    return x > high ? splat(high) : x;
}

// Calls put(k, q) with q = round(x / scale) held to [low, high]; not at all if the scale is 0 or no number.
template <class T, class Put>
inline void quantize(const T* x, int64_t n, float scale, float low, float high, Put put) {
    if (!(scale < 0.0f || scale > 0.0f)) return;
    for_each_vector(n, [&](int64_t i, auto lanes) {
        const Vec q = within(round(load(x + i, lanes) / scale), low, high);
        for (int64_t j = 0; j < kLanes && i + j < n; ++j) put(i + j, static_cast<int64_t>(q[j]));
    });
}

// Whether float16 has a scale to 2^-8 of itself or better. What is no number shows in any type.
inline bool fits_float16(float scale) {
    return !(scale > 0.0f && scale < 0x1p-17f) && !(scale >= 65520.0f);
}

// With scales of type S, each rounded before numbers are divided by it. A group's scale that float16 has is the same in
// float32: a matrix has the same numbers as its parts, of which some may have scales in float16. In float16, those that do not
// fit are counted, and what is packed is not to be used if there are any.
template <class S, class T>
inline void pack_int8(uint8_t* out, S* scales, const T* rows, const Weight& to, int64_t panel, Refusals& misfits) {
    const bool grouped = to.packing.group != 0;
    __builtin_memset(out, kInt8Zero, static_cast<size_t>(to.panel_bytes()));
    for (int64_t i = 0; i < to.groups() * kPanel; ++i) scales[i] = S{};
    for (int64_t j = 0; j < to.count(panel); ++j) {
        for_each_group(to, 0, to.inputs, [&](int64_t start, int64_t end, int64_t group) {
            const T* x = rows + (to.row(panel) + j) * to.inputs + start;
            const Range range = range_of(x, end - start);
            const float most = range.high > -range.low ? range.high : -range.low;
            const float exact = scale_of(most, 127.0f);
            const bool fits = !grouped || fits_float16(exact);
            Float16 half;
            store(&half, splat(exact), First{1});
            S* scale = scales + group * kPanel + j;
            store(scale, splat(grouped && fits ? to_float(half) : exact), First{1});
            if (!fits) misfits.add();
            quantize(x, end - start, to_float(*scale), -127.0f, 127.0f, [&](int64_t k, int64_t q) {
                out[byte_of(start + k, j, 1)] = static_cast<uint8_t>(q + kInt8Zero);
            });
        });
    }
}

// The scale of one group, and its zero point.
struct Steps {
    BFloat16 scale;
    float width;
    int64_t zero;

    bool usable() const { return width < 0.0f || width > 0.0f; }
    float low() const { return static_cast<float>(-zero); }
    float high() const { return low() + 15.0f; }
};

// Steps that span a part of a group's range.
inline Steps steps_of(Range range, bool symmetric, float factor) {
    const float extreme = range.high >= -range.low ? range.high : range.low;
    const float exact = symmetric ? scale_of(extreme, -8.0f) : scale_of(range.high - range.low, 15.0f);
    Steps steps = {};
    store(&steps.scale, splat(exact * factor), First{1});
    steps.width = to_float(steps.scale);
    steps.zero = symmetric ? 8 : steps.usable() ? static_cast<int64_t>(round(-range.low * factor / steps.width)) : 0;
    steps.zero = steps.zero > 15 ? 15 : steps.zero;
    return steps;
}

// The squared error of a group in such steps; multiplied, not divided, which differs where both neighbors are as good.
template <class T>
inline float error_of(const T* x, int64_t n, const Steps& steps) {
    if (!steps.usable()) return __builtin_inff();
    Vec total = {};
    const float inverse = 1.0f / steps.width;
    for_each_vector(n, [&](int64_t i, auto lanes) {
        const Vec v = load(x + i, lanes), error = within(round(v * inverse), steps.low(), steps.high()) * steps.width - v;
        total = total + error * error;
    });
    return sum(total);
}

// The steps with the least error, the first of equals: the whole range, and 18 / 16 to 11 / 16 of it. The oracle is
// `best_steps` of quire/kernels/formats/search.py.
template <class T>
inline Steps best_steps(const T* x, int64_t n, bool symmetric) {
    const Range range = range_of(x, n);
    Steps best = steps_of(range, symmetric, 1.0f);
    float least = error_of(x, n, best);
    for (int64_t part = 18; part > 10; --part) {
        const Steps steps = steps_of(range, symmetric, static_cast<float>(part) / 16.0f);
        const float error = error_of(x, n, steps);
        if (error < least) {
            best = steps;
            least = error;
        }
    }
    return best;
}

template <class T>
inline void pack_int4(uint8_t* out, BFloat16* scales, uint8_t* zeros, const T* rows, const Weight& to, int64_t panel) {
    __builtin_memset(out, 0, static_cast<size_t>(to.panel_bytes()));
    for (int64_t i = 0; i < to.groups() * kPanel; ++i) {
        scales[i] = BFloat16{};
        if (zeros) zeros[i] = 0;
    }
    for (int64_t j = 0; j < to.count(panel); ++j) {
        for_each_group(to, 0, to.inputs, [&](int64_t start, int64_t end, int64_t group) {
            const int64_t n = end - start;
            const T* x = rows + (to.row(panel) + j) * to.inputs + start;
            const Steps steps = best_steps(x, n, !zeros);
            scales[group * kPanel + j] = steps.scale;
            if (zeros) zeros[group * kPanel + j] = static_cast<uint8_t>(steps.zero);
            quantize(x, n, steps.width, steps.low(), steps.high(), [&](int64_t k, int64_t q) {
                out[byte_of(start + k, j, 2)] |= static_cast<uint8_t>((q + steps.zero) << shift_of(start + k));
            });
        });
    }
}

// A group as it is kept in two levels: a weight is scale * code - minimum. Without a usable scale all codes are 0.
struct Line {
    float scale, minimum;

    bool usable() const { return scale > 0.0f; }
    Vec codes(Vec x) const { return within(round((x + minimum) * (1.0f / scale)), 0.0f, 15.0f); }
};

inline Vec at(const float* x, int64_t i) { return load(reinterpret_cast<const Float32*>(x) + i, All{}); }

// Values of a group, filled up with 0 to the group's size, what errors of each are weighted by, and the sum of that.
struct GroupValues {
    const float* x;
    int64_t n;
    float typical;  // mean magnitude
    float total;

    GroupValues(const float* x, int64_t n) : x(x), n(n) {
        Vec magnitudes = {}, weights = {};
        for (int64_t i = 0; i < n; i += kLanes) magnitudes = magnitudes + magnitude(i);
        typical = sum(magnitudes) / static_cast<float>(n);
        for (int64_t i = 0; i < n; i += kLanes) weights = weights + weight(i);
        total = sum(weights);
    }
    Vec magnitude(int64_t i) const {
        const Vec v = at(x, i);
        return v < 0.0f ? -v : v;
    }
    Vec weight(int64_t i) const { return magnitude(i) + typical; }
};

// Weighted sums over a group and its codes, from which the best line follows.
struct LineSums {
    float error, codes, squares, values, products;

    LineSums(const GroupValues& group, const Line& line) {
        Vec of[5] = {};
        for (int64_t i = 0; i < group.n; i += kLanes) {
            const Vec v = at(group.x, i), w = group.weight(i);
            const Vec c = line.usable() ? line.codes(v) : Vec{};
            const Vec off = (c * line.scale - line.minimum) - v;
            of[0] = of[0] + off * off * w;
            of[1] = of[1] + c * w;
            of[2] = of[2] + c * c * w;
            of[3] = of[3] + v * w;
            of[4] = of[4] + c * v * w;
        }
        error = sum(of[0]), codes = sum(of[1]), squares = sum(of[2]), values = sum(of[3]), products = sum(of[4]);
    }
    // The minimum with the least error for these codes at such a scale; 0 for a group of zeros.
    float minimum(float scale, float total) const { return total == 0.0f ? 0.0f : (scale * codes - values) / total; }
};

// Least squares between codes and values in turn, from lines over the whole range and over less; the line with the least
// error, the first of equals. The oracle is `best_lines` of quire/kernels/formats/two_level.py.
inline Line best_line(const GroupValues& group) {
    const float* x = group.x;
    const int64_t n = group.n;
    float low = x[0], high = x[0], poison = 0.0f;
    for (int64_t i = 0; i < n; ++i) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
        poison += x[i] * 0.0f;
    }
    if (poison != 0.0f) return {__builtin_nanf(""), 0.0f};
    Line best = {0.0f, -low};
    float least = __builtin_inff();
    constexpr float kParts[] = {1.0f, 1.125f, 0.875f, 0.75f};
    for (const float part : kParts) {
        Line line = {};
        line.scale = (high - low) / 15.0f * part;
        line.minimum = line.scale * 7.5f - (low + high) * 0.5f;
        for (int turn = 0; line.usable(); ++turn) {
            const LineSums sums(group, line);
            if (sums.error < least) best = line, least = sums.error;
            if (turn == 3) break;
            const float spread = group.total * sums.squares - sums.codes * sums.codes;
            const float scale = (group.total * sums.products - sums.codes * sums.values) / spread;
            if (spread > 0.0f && scale > 0.0f) line.scale = scale;
            line.minimum = sums.minimum(line.scale, group.total);
        }
    }
    return best;
}

// Makes numbers of a block multiples of a step in float16, up to 127 of them; NaN is the step of a block that has one.
inline Float16 level(float* numbers, int8_t* factors, int64_t count) {
    float most = 0.0f;
    bool broken = false;
    for (int64_t i = 0; i < count; ++i) {
        const float size = numbers[i] < 0.0f ? -numbers[i] : numbers[i];
        most = size > most ? size : most;
        broken = broken || size != size;
    }
    Float16 step;
    store(&step, splat(broken ? __builtin_nanf("") : most / 127.0f), First{1});
    float width = to_float(step);
    if (!__builtin_isfinite(width)) {
        width = __builtin_nanf("");
        store(&step, splat(width), First{1});
    }
    for (int64_t i = 0; i < count; ++i) {
        const float factor = width > 0.0f ? round(numbers[i] / width) : 0.0f;
        factors[i] = static_cast<int8_t>(factor > 127.0f ? 127.0f : factor < -127.0f ? -127.0f : factor);
        numbers[i] = static_cast<float>(factors[i]) * width;
    }
    return step;
}

// Steps of scales from this one on are in float16 to 2^-3 of themselves or better.
constexpr float kLeastStep = 0x1p-22f;

inline bool all_alike(const float* x, int64_t n) {
    for (int64_t i = 1; i < n; ++i) {
        if (x[i] != x[0]) return false;
    }
    return true;
}

// Lines of the groups of one output in a block of 256 k, whose values `x` are filled up with 0. They fit unless float16 does
// not have their steps.
struct BlockLines {
    static constexpr int64_t kMostGroups = kBlockInputs / 16;
    float scales[kMostGroups], minimums[kMostGroups];
    int8_t scale_factors[kMostGroups], minimum_factors[kMostGroups];
    Float16 scale_step, minimum_step;
    bool fit;

    BlockLines(const float* x, int64_t group) {
        const int64_t count = kBlockInputs / group;
        bool varies = false;
        for (int64_t i = 0; i < count; ++i) {
            const Line line = best_line(GroupValues(x + i * group, group));
            varies = varies || line.usable() || !all_alike(x + i * group, group);
            scales[i] = line.scale;
            minimums[i] = line.minimum;
        }
        scale_step = level(scales, scale_factors, count);
        for (int64_t i = 0; i < count; ++i) {
            const Line line = {scales[i], minimums[i]};
            const GroupValues values(x + i * group, group);
            minimums[i] = LineSums(values, line).minimum(line.scale, values.total);
        }
        minimum_step = level(minimums, minimum_factors, count);
        const float step = to_float(scale_step);
        fit = __builtin_isfinite(step) && __builtin_isfinite(to_float(minimum_step)) && !(varies && step < kLeastStep);
    }
    Line line(int64_t i) const { return {scales[i], minimums[i]}; }
};

template <class T>
inline void pack_two_level(uint8_t* out, uint8_t* scales, uint8_t* minimums, const T* rows, const Weight& to, int64_t panel,
                           Refusals& misfits) {
    const int64_t group = to.packing.group, each = kBlockInputs / group, block_bytes = to.scale_stream().block_bytes();
    const int64_t bytes = to.scale_stream().panel_bytes(to.groups());
    __builtin_memset(out, 0, static_cast<size_t>(to.panel_bytes()));
    __builtin_memset(scales, 0, static_cast<size_t>(bytes));
    __builtin_memset(minimums, 0, static_cast<size_t>(bytes));
    for (int64_t j = 0; j < to.count(panel); ++j) {
        const T* row = rows + (to.row(panel) + j) * to.inputs;
        for (int64_t start = 0, block = 0; start < to.inputs; start += kBlockInputs, ++block) {
            const int64_t n = to.inputs - start < kBlockInputs ? to.inputs - start : kBlockInputs;
            float x[kBlockInputs] = {};
            for (int64_t k = 0; k < n; ++k) x[k] = to_float(row[start + k]);
            const BlockLines lines(x, group);
            if (!lines.fit) misfits.add();
            const int64_t left = to.groups() - block * each, count = left < each ? left : each;
            const auto put = [&](uint8_t* stream, Float16 step, const int8_t* factors) {
                __builtin_memcpy(stream + block * block_bytes + j * 2, &step, sizeof step);
                for (int64_t i = 0; i < count; ++i) {
                    stream[block * block_bytes + kStepsBytes + i * kPanel + j] = static_cast<uint8_t>(factors[i]);
                }
            };
            put(scales, lines.scale_step, lines.scale_factors);
            put(minimums, lines.minimum_step, lines.minimum_factors);
            for (int64_t k = 0; k < n; k += kLanes) {
                const Line line = lines.line(k / group);
                if (!line.usable()) continue;
                const Vec codes = line.codes(load(reinterpret_cast<const Float32*>(x) + k, All{}));
                for (int64_t i = 0; i < kLanes && k + i < n; ++i) {
                    const int64_t at = start + k + i;
                    out[byte_of(at, j, 2)] |= static_cast<uint8_t>(static_cast<int64_t>(codes[i]) << shift_of(at));
                }
            }
        }
    }
}

template <class T>
inline void pack_panel(const Weight& to, const T* rows, int64_t panel, Refusals& misfits) {
    uint8_t* data = const_cast<uint8_t*>(to.panel(panel));
    void *scales = const_cast<void*>(to.scales), *zeros = const_cast<void*>(to.zeros);
    const int64_t first = panel * to.groups() * kPanel;
    switch (to.packing.format) {
        case kInt8:
            if (to.packing.scales_type == kFloat16)
                return pack_int8(data, static_cast<Float16*>(scales) + first, rows, to, panel, misfits);
            return pack_int8(data, static_cast<Float32*>(scales) + first, rows, to, panel, misfits);
        case kInt4:
            if (to.packing.scales_type == kBlocks) {
                const int64_t at = panel * to.scale_stream().panel_bytes(to.groups());
                return pack_two_level(data, static_cast<uint8_t*>(scales) + at, static_cast<uint8_t*>(zeros) + at, rows, to, panel,
                                      misfits);
            }
            return pack_int4(data, static_cast<BFloat16*>(scales) + first, zeros ? static_cast<uint8_t*>(zeros) + first : nullptr,
                             rows, to, panel);
        default: return pack_floats(reinterpret_cast<T*>(data), rows, to, panel);
    }
}

// What is packed here: int8 with float32 scales, or float16 scales of groups, and int4 with bfloat16 scales and integer zero
// points, or in two levels.
inline bool is_packed_here(const Packing& packing) {
    const int64_t zeros = packing.zeros_type;
    switch (packing.format) {
        case kInt8:
            return (packing.scales_type == kFloat32 || (packing.group && packing.scales_type == kFloat16)) && zeros == kNoStream;
        case kInt4:
            if (packing.scales_type == kBlocks) return zeros == kBlocks;
            return packing.scales_type == kBFloat16 && (zeros == kNoStream || zeros == kBytes);
        default: return packing.is_float();
    }
}

inline float lane_of(Lanes16 lanes, int64_t lane) {
    Float32 all[kPanel];
    store16(all, lanes);
    return all[lane].value;
}

// One output of a panel of floats.
template <class T>
inline void read_floats(float* out, const Weight& from, int64_t panel, int64_t lane, T) {
    const T* data = reinterpret_cast<const T*>(from.panel(panel));
    for (int64_t k = 0; k < from.inputs; ++k) out[k] = to_float(data[place(k, lane, T{})]);
}

// One output of a panel of codes, rounded as WidePanels does.
inline void read_codes(float* out, const Weight& from, int64_t panel, int64_t lane) {
    const Stream scales = from.scale_stream().from(panel, from.groups()), zeros = from.zero_stream().from(panel, from.groups());
    const uint8_t* data = from.panel(panel);
    with_values(from.packing, [&](auto values) {
        for_each_group(from, 0, from.inputs, [&](int64_t k, int64_t end, int64_t group) {
            const Shifts shifts(from, zeros, group);
            const float scale = lane_of(scales.at(group), lane);
            const float point = lane_of(shifts.point, lane), minimum = lane_of(shifts.minimum, lane);
            for (; k < end; ++k) {
                out[k] = (values.of(values.code(data, k, lane)) - point) * scale - minimum;
            }
        });
        return int64_t{0};
    });
}

}  // namespace

// Returns how many scales do not fit into float16, where that is their type; -1 for a format whose numbers are not found here.
int64_t pack_weight(void* data, void* scales, void* zeros, const void* rows, int64_t outputs, int64_t inputs,
                    int64_t halves, int64_t group, int64_t scales_type, int64_t zeros_type, int64_t dtype, int64_t format) {
    const Weight to = {data, scales, zeros, outputs, inputs, halves, {group, scales_type, zeros_type, format}};
    if (!is_packed_here(to.packing)) return -1;
    return with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        prefer_huge_pages(data, to.panels() * to.panel_bytes());
        Refusals misfits;
        share(to.panels(), kElementWork * outputs * inputs,
              [&](int64_t panel) { pack_panel(to, static_cast<const T*>(rows), panel, misfits); });
        return misfits.count();
    });
}

// Returns how many ids are outside the table; their rows are left as they were.
int64_t packed_embedding(void* out, const int64_t* ids, const void* data, const void* scales, const void* zeros,
                         int64_t count, int64_t outputs, int64_t inputs, int64_t halves, int64_t group, int64_t scales_type,
                         int64_t zeros_type, int64_t format) {
    const Weight from = {data, scales, zeros, outputs, inputs, halves, {group, scales_type, zeros_type, format}};
    if (format > kFloat16 && with_values(from.packing, [](auto) { return int64_t{0}; })) return -1;
    Refusals refused;
    share(count, kElementWork * count * inputs, [&](int64_t i) {
        if (ids[i] < 0 || ids[i] >= outputs) return refused.add();
        const int64_t half = from.half(), n = ids[i] % half, panel = n / kPanel * halves + ids[i] / half;
        float* row = static_cast<float*>(out) + i * inputs;
        if (!from.packing.is_float()) return read_codes(row, from, panel, n % kPanel);
        with_dtype(format, [&](auto t) {
            read_floats(row, from, panel, n % kPanel, t);
            return int64_t{0};
        });
    });
    return refused.count();
}

}}  // namespace quire::QUIRE_ISA
