// Exact dot products of unsigned weights and signed 8-bit activations, for 16 outputs at once, a step of k at a time.
//
// All instruction sets make the same integers. A Dot names what a step of packed weights becomes in registers (Weights),
// what its products are summed in over a part of a chunk (Sum), how many k a part has (few enough that no sum overflows, and
// no more than share a scale of weights), and from how many tiles of rows on weights are unpacked once for all. A sum starts
// with the word that `start_word` makes of a part's activations: a factor times their sum, which takes the weights' zero
// point out at no cost.

#pragma once

#include "panels.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Values of k that are summed as integers.
constexpr int64_t kInt4Part = 32, kInt8Part = kChunk;

// Most that the magnitudes of two activations, k and k + 1 with k even, come to where weights have eight bits.
constexpr int64_t kInt8Pair = 128;

constexpr int64_t kNever = INT64_MAX;

inline int32_t sum_of(const int8_t* values, int64_t count) {
    int32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += values[i];
    return sum;
}

// The Dots of an instruction set that multiplies quads of bytes and adds them to 32 bits: Quads are the 64 bytes of a step in
// registers, from `bytes` (of which `kTaken` is taken, for instructions on signed ones) or as `low` and `high` nibbles.
template <class Dots>
struct Int8DotOf {
    static constexpr int64_t kPart = kInt8Part;
    static constexpr int kQuads = 1;
    static constexpr int64_t kUnpackTiles = kNever;
    using Sum = typename Dots::Sum;
    struct Weights { typename Dots::Quads quads[kQuads]; };

    static Weights unpack(const uint8_t* step) { return {{Dots::bytes(step)}}; }
    static void add(Sum& sum, const Weights& w, int quad, const int32_t* x) { Dots::add(sum, w.quads[quad], x); }
    static int32_t start_word(const int8_t* values, int32_t factor) { return (factor + Dots::kTaken) * sum_of(values, kPart); }
    static Sum start(int32_t word) { return Dots::start(word); }
    static Ints16 total(const Sum& sum) { return Dots::total(sum); }
};

template <class Dots, int64_t unpack_tiles = kNever>
struct Int4DotOf {
    static constexpr int64_t kPart = kInt4Part;
    static constexpr int kQuads = 2;
    static constexpr int64_t kUnpackTiles = unpack_tiles;
    using Sum = typename Dots::Sum;
    struct Weights { typename Dots::Quads quads[kQuads]; };

    static Weights unpack(const uint8_t* step) { return {{Dots::low(step), Dots::high(step)}}; }
    static void add(Sum& sum, const Weights& w, int quad, const int32_t* x) { Dots::add(sum, w.quads[quad], x); }
    static int32_t start_word(const int8_t* values, int32_t factor) { return factor * sum_of(values, kPart); }
    static Sum start(int32_t word) { return Dots::start(word); }
    static Ints16 total(const Sum& sum) { return Dots::total(sum); }
};

}}}  // namespace quire::QUIRE_ISA
