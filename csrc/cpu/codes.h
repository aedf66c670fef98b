// What codes of packed weights stand for, as floats: in the precise mode and where rows are looked up.

#pragma once

#include "books.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Sixteen codes of k, at the step of the panel in which they stand, and one.
struct Int8Values {
    static constexpr int64_t kPerByte = 1;
    int32_t zero;

    Lanes16 at(const uint8_t* step, int64_t k) const {
        return to_floats(bits_of(load_words(step), k % kQuad * 8, 255) - splat16(zero));
    }
    float of(uint8_t code) const { return static_cast<float>(code - zero); }
};

struct Int4Values {
    static constexpr int64_t kPerByte = 2;
    int32_t zero;

    Lanes16 at(const uint8_t* step, int64_t k) const {
        return to_floats(bits_of(load_words(step), k % kQuad * 8 + shift_of(k), 15) - splat16(zero));
    }
    float of(uint8_t code) const { return static_cast<float>(code - zero); }
};

// E4M3 has an exponent of 4 bits and a mantissa of 3: at the place of a float's they are 2^120 times too small, subnormal
// numbers included. It has no infinities, and one NaN.
inline float from_e4m3(uint32_t code) {
    const uint32_t magnitude = code & 0x7f, nan = (magnitude + 1) >> 7;
    const uint32_t bits = magnitude << 20;
    float scaled;
    __builtin_memcpy(&scaled, &bits, sizeof scaled);
    scaled *= 0x1p120f;
    uint32_t result;
    __builtin_memcpy(&result, &scaled, sizeof result);
    result |= (code & 0x80) << 24 | nan * 0x7fc00000;
    float value;
    __builtin_memcpy(&value, &result, sizeof value);
    return value;
}

// Sixteen words' bytes, or nibbles, one after the other.
template <class Convert>
inline Lanes16 each_word(const uint8_t* step, int64_t shift, uint32_t mask, Convert convert) {
    uint32_t words[kPanel];
    Float32 values[kPanel];
    __builtin_memcpy(words, step, sizeof words);
    for (int64_t j = 0; j < kPanel; ++j) values[j].value = convert(words[j] >> shift & mask);
    return load16(values);
}

struct Fp8Values {
    static constexpr int64_t kPerByte = 1;

    Lanes16 at(const uint8_t* step, int64_t k) const { return each_word(step, k % kQuad * 8, 255, from_e4m3); }
    float of(uint8_t code) const { return from_e4m3(code); }
};

struct BookValues {
    static constexpr int64_t kPerByte = 2;
    const Float32* book;

    Lanes16 at(const uint8_t* step, int64_t k) const {
        const int64_t shift = k % kQuad * 8 + shift_of(k);
#ifdef __AVX512F__
        return {_mm512_permutexvar_ps(bits_of(load_words(step), shift, 15).all, load16(book).all)};
#else
        return each_word(step, shift, 15, [&](uint32_t code) { return book[code].value; });
#endif
    }
    float of(uint8_t code) const { return book[code].value; }
};

// Calls body with the values of a format; -1 if there is no such format.
template <class Body>
inline int64_t with_values(const Packing& packing, Body body) {
    switch (packing.format) {
        case kInt8: return body(Int8Values{zero_of(packing)});
        case kInt4: return body(Int4Values{zero_of(packing)});
        case kFp8: return body(Fp8Values{});
        case kE2M1: case kIQ4NL: case kNF4: case kFP4: return body(BookValues{book_of(packing.format).values});
        default: return -1;
    }
}

// Calls body(begin, end, group) for the groups of which there are some in [start, start + count).
template <class Body>
inline void for_each_group(const Weight& weight, int64_t start, int64_t count, Body body) {
    const int64_t size = weight.group_inputs(), last = start + count;
    for (int64_t k = start; k < last;) {
        const int64_t group = k / size, end = (group + 1) * size < last ? (group + 1) * size : last;
        body(k, end, group);
        k = end;
    }
}

// What is taken from the codes' values of a group, before and after they are scaled.
struct Shifts {
    Lanes16 point = splat16(0.0f), minimum = splat16(0.0f);

    Shifts(const Weight& weight, const Stream& zeros, int64_t group) {
        if (zeros.type == kBytes) point = zeros.at(group, 0) - splat16(static_cast<float>(zero_of(weight.packing)));
        else if (zeros.type != kNoStream) minimum = zeros.at(group, 0);
    }
    Lanes16 of(Lanes16 value, Lanes16 scale) const { return (value - point) * scale - minimum; }
};

// Panels of codes, which are widened while they are multiplied, with the same roundings everywhere.
struct WidePanels {
    const Weight& weight;

    static constexpr bool kDirect = false;

    int64_t depth() const { return weight.inputs; }

    void widen(Float32* wide, int64_t index, int64_t start, int64_t count) const {
        const Stream scales = weight.scale_stream().from(index, weight.groups());
        const Stream zeros = weight.zero_stream().from(index, weight.groups());
        const uint8_t* panel = weight.panel(index);
        with_values(weight.packing, [&](auto values) {
            for_each_group(weight, start, count, [&](int64_t k, int64_t end, int64_t group) {
                const Lanes16 scale = scales.at(group, 0);
                const Shifts shifts(weight, zeros, group);
                const auto put = [&](auto weight_of) {
                    for (; k < end; ++k, wide += kPanel) {
                        const uint8_t* step = panel + byte_of(k, 0, values.kPerByte) - k % kQuad;
                        store16(wide, weight_of(values.at(step, k)));
                    }
                };
                if (weight.packing.shifts()) put([&](Lanes16 value) { return shifts.of(value, scale); });
                else put([&](Lanes16 value) { return value * scale; });
            });
            return int64_t{0};
        });
    }

    void scale(Float32*, int64_t) const {}
};

}}}  // namespace quire::QUIRE_ISA
