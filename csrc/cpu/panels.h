// Packed weights: how a matrix [N, K] lies in memory so that every kernel can vectorise over outputs.
//
// A panel holds 16 outputs. Float panels are [K][16], and of bfloat16 [K / 2][16][2], the second of two k first; integer
// panels walk k in quads, because four bytes of k are what one
// dot-product instruction eats per output. A step is 64 bytes: one quad of int8, [16][4], or two of int4, the first in the
// low nibbles and the second in the high ones. Integers are stored without sign, with a zero point. Rows beyond N and k
// beyond K hold anything finite: activations are 0 there. A matrix in two halves (gate and up of an MLP) alternates their
// panels, so that the outputs that belong together are made together. One layout serves all instruction sets.

#pragma once

#include "kernels.h"
#include "lanes16.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kPanel = 16;
constexpr int64_t kQuad = 4;
constexpr int64_t kStepBytes = kPanel * kQuad;

// Values of k that share a scale of activations; integer panels hold whole chunks.
constexpr int64_t kChunk = 64;

// Formats of packed weights, by the codes that callers pass; the first three are those of DType.
enum Format : int64_t { kInt8 = 3, kInt4 = 4 };

// Zero points where none are stored.
constexpr int32_t kInt8Zero = 128, kInt4Zero = 8;

// A packed matrix. Integer formats: int8 has a float32 scale per output; int4 has a bfloat16 scale, and an integer zero
// point in 0..15, per output and group of k, [panel][group][16]. k is padded to whole groups and chunks; of floats
// to their group alone, which is 2 for bfloat16 and else 1.
struct Weight {
    const void* data;
    const void* scales;
    const uint8_t* zeros;
    int64_t outputs, inputs, halves, group;

    int64_t half() const { return outputs / halves; }
    int64_t panels() const { return (half() + kPanel - 1) / kPanel * halves; }
    int64_t padded() const {
        const int64_t unit = group <= 2 || group > kChunk ? group : kChunk;
        return (inputs + unit - 1) / unit * unit;
    }
    int64_t groups() const { return padded() / group; }
    // First row of a panel, and how many of its outputs exist.
    int64_t row(int64_t panel) const { return panel % halves * half() + panel / halves * kPanel; }
    int64_t count(int64_t panel) const {
        const int64_t left = half() - panel / halves * kPanel;
        return left < kPanel ? left : kPanel;
    }
    // Steps of a panel of integers.
    int64_t steps(int64_t format) const { return padded() / (format == kInt4 ? 2 * kQuad : kQuad); }
    int64_t panel_bytes(int64_t format) const {
        if (format == kInt8 || format == kInt4) return steps(format) * kStepBytes;
        return padded() * kPanel * (format == kFloat32 ? 4 : 2);
    }
    // The matrix of some outputs of one that is not in halves, from `first` on, both whole panels.
    Weight some(int64_t first, int64_t count, int64_t format) const {
        const int64_t skipped = first / kPanel;
        const auto from = [skipped](const void* at, int64_t bytes) { return static_cast<const uint8_t*>(at) + skipped * bytes; };
        Weight part = *this;
        part.outputs = count;
        part.data = from(data, panel_bytes(format));
        if (scales) part.scales = from(scales, kPanel * (format == kInt4 ? 2 * groups() : 4));
        if (zeros) part.zeros = from(zeros, kPanel * groups());
        return part;
    }
};

// Where lane j's value of k stands in a panel of integers: a byte, and the nibble in it.
inline int64_t byte_of(int64_t k, int64_t j, int64_t format) {
    const int64_t step = format == kInt4 ? k / (2 * kQuad) : k / kQuad;
    return step * kStepBytes + j * kQuad + k % kQuad;
}
inline int64_t shift_of(int64_t k) { return k / kQuad % 2 * 4; }

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
