// SPDX-License-Identifier: Apache-2.0
// Packed weights: how a matrix [N, K] lies in memory so that every kernel can vectorize over outputs.
//
// A panel holds 16 outputs. Float panels are [K][16], and of bfloat16 [K / 2][16][2], the second of two k first. Panels of
// codes walk k in quads, because four bytes of k are what one dot-product instruction eats per output. A step is 64 bytes:
// one quad of 8 bits, [16][4], or two of 4 bits, the first in the low nibbles and the second in the high ones. A step of 6 bits
// is 192 bytes: two such steps of the low nibbles of four quads, and 64 bytes of their high bits, two of each quad, the first
// lowest. Integers are stored without sign, with a zero point. Rows beyond N and k beyond K hold anything finite: activations are 0 there. A matrix in two halves (gate and up of an MLP) alternates their
// panels, so that the outputs that belong together are made together. One layout serves all instruction sets.

#pragma once

#include "scaling.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kQuad = 4;
constexpr int64_t kStepBytes = kPanel * kQuad;

// A step of codes of 6 bits: its quads, and its bytes.
constexpr int64_t kSixQuads = 4, kSixBytes = 3 * kStepBytes;

// Values of k that share a scale of activations; panels of codes hold whole chunks.
constexpr int64_t kChunk = 64;

// Formats of packed weights, by the codes that callers pass; the first three are those of DType.
enum Format : int64_t { kInt8 = 3, kInt4 = 4, kFp8 = 5, kE2M1 = 6, kIQ4NL = 7, kNF4 = 8, kFP4 = 9, kInt6 = 10 };

// Zero points where none are stored; a book's are of its integers.
constexpr int32_t kInt8Zero = 128, kInt4Zero = 8, kInt6Zero = 32, kBookZero = 128;

// How matrices are packed: values of k that share a scale, 0 if all of an output do, and the types of scales and of zero
// points or minimums. For floats `group` is what k is padded to a multiple of: 2 for bfloat16 and else 1.
struct Packing {
    int64_t group, scales_type, zeros_type, format;

    bool is_float() const { return format <= kFloat16; }
    bool has_book() const { return format >= kE2M1 && format <= kFP4; }
    bool shifts() const { return zeros_type != kNoStream; }
    bool is_plain_int8() const { return format == kInt8 && !group && !shifts(); }
    // Values of k in a step of codes, and its bytes.
    int64_t step_inputs() const { return format == kInt6 ? kSixQuads * kQuad : format == kInt8 || format == kFp8 ? kQuad : 2 * kQuad; }
    int64_t step_bytes() const { return format == kInt6 ? kSixBytes : kStepBytes; }
};

// What is taken out of codes, or of what a book makes of them, before they are scaled.
inline int32_t zero_of(const Packing& packing) {
    switch (packing.format) {
        case kInt8: return kInt8Zero;
        case kInt4: return packing.shifts() ? 0 : kInt4Zero;
        case kInt6: return kInt6Zero;
        default: return packing.has_book() ? kBookZero : 0;
    }
}

// A packed matrix, in one part or two halves. k is padded to whole groups, and of codes to whole chunks.
struct Weight {
    const void* data;
    const void* scales;
    const void* zeros;
    int64_t outputs, inputs, halves;
    Packing packing;

    // Divisions by 1 or 2 that take no time: they are asked for with every few panels.
    int64_t half() const { return outputs >> (halves - 1); }
    int64_t of_half(int64_t panel) const { return panel >> (halves - 1); }
    int64_t panels() const { return (half() + kPanel - 1) / kPanel * halves; }
    int64_t padded() const {
        const int64_t group = packing.group, unit = packing.is_float() || group > kChunk ? group : kChunk;
        return (inputs + unit - 1) / unit * unit;
    }
    int64_t group_inputs() const { return packing.group ? packing.group : padded(); }
    int64_t groups() const { return padded() / group_inputs(); }
    Stream scale_stream() const { return {scales, packing.scales_type, packing.group}; }
    Stream zero_stream() const { return {zeros, packing.zeros_type, packing.group}; }
    // First row of a panel, and how many of its outputs exist.
    int64_t row(int64_t panel) const { return (panel & (halves - 1)) * half() + of_half(panel) * kPanel; }
    int64_t count(int64_t panel) const {
        const int64_t left = half() - of_half(panel) * kPanel;
        return left < kPanel ? left : kPanel;
    }
    int64_t panel_bytes() const {
        if (packing.is_float()) return padded() * kPanel * (packing.format == kFloat32 ? 4 : 2);
        return padded() / packing.step_inputs() * packing.step_bytes();
    }
    const uint8_t* panel(int64_t index) const { return static_cast<const uint8_t*>(data) + index * panel_bytes(); }
    // The matrix of some outputs of one that is not in halves, from `first` on, both whole panels.
    Weight some(int64_t first, int64_t count) const {
        const int64_t skipped = first / kPanel;
        Weight part = *this;
        part.outputs = count;
        part.data = panel(skipped);
        if (packing.is_float()) return part;
        part.scales = scale_stream().from(skipped, groups()).data;
        part.zeros = zero_stream().from(skipped, groups()).data;
        return part;
    }
};

// Where lane j's value of k stands in a panel of codes of 8 or 4 bits: a byte, and the nibble in it.
inline int64_t byte_of(int64_t k, int64_t j, int64_t per_byte) {
    return k / (kQuad * per_byte) * kStepBytes + j * kQuad + k % kQuad;
}
constexpr int64_t shift_of(int64_t k) { return k / kQuad % 2 * 4; }

// Values of k that stand together in a panel of floats. Two bfloat16 are what one instruction multiplies and adds, the one
// in the high half first; wherever there is none, a shift and a mask widen them.
template <class W>
constexpr int64_t kTogether = 1;
template <>
constexpr int64_t kTogether<BFloat16> = 2;

// Where lane j's value of k stands in a panel of floats.
template <class W>
inline int64_t place(int64_t k, int64_t j, W) { return k * kPanel + j; }
inline int64_t place(int64_t k, int64_t j, BFloat16) { return (k / 2 * kPanel + j) * 2 + 1 - k % 2; }

// Sixteen weights of k: the values of k that stand together begin at p, and `index` says which of them.
template <class T>
inline Lanes16 load_row(const T* p, int64_t) { return load16(p); }

inline Lanes16 load_row(const BFloat16* p, int64_t index) {
    return index == 0 ? high_halves(load_words(p)) : low_halves(load_words(p));
}

inline float to_float(Float32 x) { return x.value; }
template <class T>
inline float to_float(T x) { return load(&x, First{1})[0]; }

}}}  // namespace quire::QUIRE_ISA
