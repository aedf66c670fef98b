// SPDX-License-Identifier: Apache-2.0
// Exact dot products of unsigned weights and signed 8-bit activations, for 16 outputs at once, a step of k at a time.
//
// All instruction sets make the same integers. A Dot names what a step of packed weights becomes in registers (Weights),
// what its products are summed in over a part of a chunk (Sum), how many k a part has (few enough that no sum overflows, 32
// of 4 bits, and no more than share a scale of weights), and from how many tiles of rows on weights are unpacked once for all. A
// sum starts with the word that `start_word` makes of a part's activations and their sum: a factor times it, which takes the
// weights' zero point out at no cost. A quad of activations is kWords words, as `put` writes those of some values, `stride` words
// apart; whether their zero point is in the words, kTakesPoints says. kTogether quads of a row are added at once.

#pragma once

#include "books.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Most that the magnitudes of two activations, k and k + 1 with k even, come to where codes are looked up in books.
constexpr int64_t kInt8Pair = 128;

constexpr int64_t kNever = INT64_MAX;

// A step whose quads are unpacked one by one.
struct PackedStep { const uint8_t* at; };

// What codes are looked up in that are integers themselves.
struct NoBook {
    explicit NoBook(int64_t) {}
};

// A quad of activations as the four bytes that it is.
struct QuadWord {
    static constexpr int kWords = 1, kTogether = 1;
    static constexpr bool kTakesPoints = false;
    template <int64_t values>
    static void put(int32_t* out, int64_t stride, const int8_t* rounded, int32_t) {
        for (int64_t k = 0; k < values; k += kQuad) __builtin_memcpy(out + k / kQuad * stride, rounded + k, kQuad);
    }
};

// The Dots of an instruction set that multiplies quads of bytes and adds them to 32 bits: Quads are the 64 bytes of a step in
// registers, from `bytes` (of which `kTaken` is taken, for instructions on signed ones) or as `low` and `high` nibbles, which
// `looked_up` makes bytes of, as a book in a register has them.
template <class Dots, int64_t part>
struct DotOf : QuadWord {
    static constexpr int64_t kPart = part, kBytes = kStepBytes;
    using Sum = typename Dots::Sum;

    template <class Weights>
    static const typename Dots::Quads& quad(const Weights& w, int quad) { return w.quads[quad]; }
    // The same of weights that lie in memory.
    template <class Weights>
    static const typename Dots::Quads& kept(const Weights& w, int at) { return quad(w, at); }
    static void add(Sum& sum, const typename Dots::Quads& quad, const int32_t* x) { Dots::add(sum, quad, x); }
    static Sum start(int32_t word) { return Dots::start(word); }
    static Ints16 total(const Sum& sum) { return Dots::total(sum); }
};

template <class Dots, int64_t part>
struct Int8DotOf : DotOf<Dots, part> {
    static constexpr int kQuads = 1;
    static constexpr int64_t kUnpackTiles = kNever;
    using Book = NoBook;
    struct Weights { typename Dots::Quads quads[kQuads]; };

    static Weights unpack(const uint8_t* step, Book) { return {{Dots::bytes(step)}}; }
    static int32_t start_word(const int8_t*, int32_t sum, int32_t factor) { return (factor + Dots::kTaken) * sum; }
};

template <class Dots, int64_t part, int64_t unpack_tiles = kNever>
struct Int4DotOf : DotOf<Dots, part> {
    static constexpr int kQuads = 2;
    static constexpr int64_t kUnpackTiles = unpack_tiles;
    using Book = NoBook;
    struct Weights { typename Dots::Quads quads[kQuads]; };

    static Weights unpack(const uint8_t* step, Book) { return {{Dots::low(step), Dots::high(step)}}; }
    static int32_t start_word(const int8_t*, int32_t sum, int32_t factor) { return factor * sum; }
};

// `six` makes the bytes of a quad of a step.
template <class Dots, int64_t part, int64_t unpack_tiles = kNever>
struct Int6DotOf : DotOf<Dots, part> {
    static constexpr int kQuads = kSixQuads;
    static constexpr int64_t kBytes = kSixBytes, kUnpackTiles = unpack_tiles;
    using Book = NoBook;
    struct Weights { typename Dots::Quads quads[kQuads]; };

    static Weights unpack(const uint8_t* step, Book) {
        return {{Dots::six(step, 0), Dots::six(step, 1), Dots::six(step, 2), Dots::six(step, 3)}};
    }
    using DotOf<Dots, part>::quad;
    static typename Dots::Quads quad(const PackedStep& step, int quad) { return Dots::six(step.at, quad); }
    static int32_t start_word(const int8_t*, int32_t sum, int32_t factor) { return factor * sum; }
};

template <class Dots, int64_t part, int64_t unpack_tiles = kNever>
struct BookDotOf : DotOf<Dots, part> {
    static constexpr int kQuads = 2;
    static constexpr int64_t kUnpackTiles = unpack_tiles;
    using Book = typename Dots::Book;
    struct Weights { typename Dots::Quads quads[kQuads]; };

    static Weights unpack(const uint8_t* step, const Book& book) {
        return {{Dots::looked_up(Dots::low(step), book), Dots::looked_up(Dots::high(step), book)}};
    }
    static int32_t start_word(const int8_t*, int32_t sum, int32_t factor) { return (factor + Dots::kTaken) * sum; }
};

}}}  // namespace quire::QUIRE_ISA
