// SPDX-License-Identifier: Apache-2.0
// The loop nest around every linear kernel, and what is done with its sums.
//
// Each output is one chain over k in order, whatever the number of rows, blocks or threads: rows and panels only say which
// chains advance together, and a block of k continues the chains that the block before it left in memory.

#pragma once

#include <type_traits>

#include "activations.h"
#include "panels.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Most rows whose sums with a panel stay in registers: of floats, and of integers, whose weights take more of them.
#ifdef __AVX512F__
constexpr int kFloatRows = 12, kIntRows = 12;
#elif defined(__AVXVNNI__) || defined(QUIRE_NEON)
constexpr int kFloatRows = 6, kIntRows = 6;
#elif defined(QUIRE_PLAIN)
constexpr int kFloatRows = 2, kIntRows = 2;
#else
constexpr int kFloatRows = 6, kIntRows = 4;
#endif

// Panels whose sums with so many rows fit beside each other.
#ifdef __AVX512F__
constexpr int kWidePanels = 2;
#else
constexpr int kWidePanels = 1;
#endif

// Of integers, sums that stay in registers from span to span beside those of a part: a store of 64 bytes takes two cycles of Zen 4.
#ifdef __AVX512F__
constexpr int kKeptSums = 12;
#else
constexpr int kKeptSums = 0;
#endif

constexpr int64_t kBlockRows = 192;  // activations that are packed together and walked panel after panel
constexpr int64_t kUnitPanels = 4;  // most panels that a thread works on together
constexpr int64_t kPartTiles = 4;   // fewest tiles that a block's rows are cut into: weights are unpacked for each
constexpr int64_t kPackWork = 2 * kElementWork;  // of an activation
constexpr int64_t kUnitsPerThread = 4;  // at least, where there are so many, for threads are not equally fast

// out [M, N], or [M, N / 2] where halves are combined; x [M, K], or rows of it by their numbers; bias [N] or null; all
// float32. Rows of x, and of out, are `x_stride` and `out_stride` apart.
struct Linear {
    Float32* out;
    const Float32* x;
    const Float32* bias;
    void* scratch;
    int64_t rows;
    int64_t activation;
    Weight weight;
    int64_t x_stride, out_stride;
    const int32_t* numbers = nullptr;

    const Float32* row(int64_t index) const { return x + (numbers ? numbers[index] : index) * x_stride; }
    // Some of the rows of a job that takes all of x.
    Linear part(int64_t first, int64_t count) const {
        Linear some = *this;
        some.out += first * out_stride, some.x += first * x_stride, some.rows = count;
        return some;
    }
};

// A job whose rows lie one behind the other.
inline Linear contiguous(Float32* out, const Float32* x, const Float32* bias, void* scratch, int64_t rows, int64_t activation,
                         const Weight& weight, const int32_t* numbers = nullptr) {
    const int64_t out_size = is_gated(activation) ? weight.half() : weight.outputs;
    return {out, x, bias, scratch, rows, activation, weight, weight.inputs, out_size, numbers};
}

// What a block of packed activations takes: 4 bytes per value and, for integers, a scale per row.
inline int64_t needed_scratch(const Linear& job) {
    const int64_t rows = job.rows < kBlockRows ? job.rows : kBlockRows;
    return 4 * (kBlockRows + rows * (job.weight.padded() + 1));
}

// Rows cut into tiles of at most `most`: as evenly as possible, or with all but the last one whole.
struct Tiling {
    int64_t rows = 0, tiles = 0, common = 0, larger = 0;  // so many are by one larger than is common
    Tiling() = default;
    Tiling(int64_t rows, int64_t most, bool even = true)
        : rows(rows), tiles((rows + most - 1) / most), common(even ? rows / tiles : most), larger(even ? rows % tiles : 0) {}
    int64_t start(int64_t tile) const { return smaller_of(tile * common + smaller_of(tile, larger), rows); }
    int64_t size(int64_t tile) const { return start(tile + 1) - start(tile); }
};

// Calls body(integral constant R) for 1 <= rows <= most.
template <int most, class Body>
inline void with_rows(int64_t rows, Body body) {
    if constexpr (most == 1) body(std::integral_constant<int, 1>{});
    else if (rows == most) body(std::integral_constant<int, most>{});
    else with_rows<most - 1>(rows, body);
}

// Calls body(integral constant P, panel) for `count` panels, as many at once as R rows of `most` leave registers for, or
// `alone` for one row.
template <int R, int most, int alone, class Body>
inline void for_panels(int64_t count, Body body) {
    constexpr int P = R == 1 ? alone : 2 * R <= most ? 2 : 1;
    int64_t panel = 0;
    for (; panel + P <= count; panel += P) body(std::integral_constant<int, P>{}, panel);
    for (; P > 1 && panel < count; ++panel) body(std::integral_constant<int, 1>{}, panel);
}

// Sixteen lanes, or the first few of them; others read as 0.
inline Lanes16 load16(const Float32* p, int64_t count) {
    if (count == kPanel) return load16(p);
    Float32 padded[kPanel] = {};
    for (int64_t i = 0; i < count; ++i) padded[i] = p[i];
    return load16(padded);
}

inline void store16(Float32* p, Lanes16 v, int64_t count) {
    if (count == kPanel) return store16(p, v);
    Float32 padded[kPanel];
    store16(padded, v);
    for (int64_t i = 0; i < count; ++i) p[i] = padded[i];
}

// What becomes of the sums of a unit's panels: where the outputs of each begin, how many exist, by what they are multiplied and
// what is added to them. What stands for a scale or a bias that is not there changes no bit.
class Outputs {
public:
    Outputs(const Linear& job, int64_t panel, int64_t panels) : job_(job), panels_(panels) {
        for (int64_t p = 0; p < panels; ++p) {
            first_[p] = job.weight.row(panel + p), count_[p] = job.weight.count(panel + p);
            scale_[p] = splat16(1.0f);
            bias_[p] = job.bias ? load16(job.bias + first_[p], count_[p]) : splat16(-0.0f);
        }
    }

    // Of panel p of the unit.
    void scale(int64_t p, Lanes16 by) { scale_[p] = by; }

    // Brings where some rows' outputs will be nearer: they lie far apart, and each is written once.
    void fetch(int64_t first_row, int64_t rows) const {
        for (int64_t row = first_row; row < first_row + rows; ++row) {
            for (int64_t p = 0; p < panels_; p += parts()) __builtin_prefetch(job_.out + row * job_.out_stride + first_[p], 1);
        }
    }

    // Of some rows: sums [rows][panels][16].
    __attribute__((noinline)) void write(int64_t first_row, int64_t rows, const Float32* sums) const {
        Float32* out = job_.out + first_row * job_.out_stride;
        with_ending(job_.activation, [&](auto ending) {
            for (int64_t row = 0; row < rows; ++row, out += job_.out_stride, sums += panels_ * kPanel) {
                for (int64_t p = 0, step = parts(); p < panels_; p += step) {
                    const Lanes16 value = by_vectors(ending, finished(sums, p), finished(sums, p + step - 1));
                    store16(out + first_[p], value, count_[p]);
                }
            }
        });
    }

private:
    // Panels that one output is made of.
    int64_t parts() const { return is_gated(job_.activation) ? 2 : 1; }

    Lanes16 finished(const Float32* sums, int64_t p) const { return load16(sums + p * kPanel) * scale_[p] + bias_[p]; }

    const Linear& job_;
    int64_t panels_, first_[kUnitPanels], count_[kUnitPanels];
    Lanes16 scale_[kUnitPanels], bias_[kUnitPanels];
};

// Tiles of a block: [begin, end).
struct Tiles { int64_t begin, end; };

// A block's sums, cut into units for threads: some panels for some of the tiles. One row has only its panels. The threads are
// shared with so many blocks.
struct Units {
    int64_t panels, unit, columns, tiles, parts;

    Units(const Weight& weight, const Tiling& tiling, int64_t blocks) : panels(weight.panels()), tiles(tiling.tiles) {
        const int64_t threads = team_threads() > blocks ? team_threads() / blocks : 1, wanted = kUnitsPerThread * threads;
        unit = tiling.rows == 1 ? kUnitPanels : 2;
        while (unit > weight.halves && (count(unit) < wanted || !falls_evenly(count(unit), threads))) unit /= 2;
        columns = count(unit);
        const int64_t most = tiles / kPartTiles, needed = (wanted + columns - 1) / columns;
        parts = most < 1 ? 1 : needed < most ? needed : most;
    }
    // Whether at least 19 of 20 threads have a unit in every round.
    static bool falls_evenly(int64_t units, int64_t threads) {
        return 20 * units >= 19 * threads * ((units + threads - 1) / threads);
    }
    int64_t count(int64_t size) const { return (panels + size - 1) / size; }
    int64_t count() const { return columns * parts; }
    int64_t panel(int64_t index) const { return index / parts * unit; }
    int64_t width(int64_t index) const { return panels - panel(index) < unit ? panels - panel(index) : unit; }
    Tiles part(int64_t index) const {
        const int64_t part = index % parts;
        return {tiles * part / parts, tiles * (part + 1) / parts};
    }
};

// A job of at most kBlockRows rows among those that run together, and how many tiles and units the ones before it have.
struct Block {
    Linear job;
    Tiling tiling{};
    int64_t first_tile = 0, first_unit = 0;
};

// The block whose tile, or unit, of all blocks' it is.
inline const Block& block_of(const Block* blocks, int64_t count, int64_t Block::* first, int64_t index) {
    while (count > 1) {
        const int64_t half = count / 2;
        if (blocks[half].*first <= index) blocks += half, count -= half;
        else count = half;
    }
    return *blocks;
}

// Runs the kernels of blocks with matrices of one shape, which share the threads; no block is empty. `kernel_of` makes the
// kernel of a job: it packs a tile of rows, and then makes the sums of a unit.
template <class KernelOf>
__attribute__((noinline)) void run_together(Block* blocks, int64_t count, const KernelOf& kernel_of) {
    using Kernel = decltype(kernel_of(blocks->job));
    const Weight& weight = blocks->job.weight;
    int64_t tiles = 0, units = 0, rows = 0;
    for (int64_t i = 0; i < count; ++i) {
        Block& block = blocks[i];
        block.tiling = Tiling(block.job.rows, Kernel::kMostRows, Kernel::kEven);
        block.first_tile = tiles, block.first_unit = units;
        tiles += block.tiling.tiles, units += Units(weight, block.tiling, count).count(), rows += block.job.rows;
    }
    share(tiles, kPackWork * rows * weight.inputs, [&](int64_t index) {
        const Block& block = block_of(blocks, count, &Block::first_tile, index);
        kernel_of(block.job).pack(block.tiling, index - block.first_tile);
    });
    share(units, rows * weight.outputs * weight.inputs, [&](int64_t index) {
        const Block& block = block_of(blocks, count, &Block::first_unit, index);
        const Units own(weight, block.tiling, count);
        index -= block.first_unit;
        kernel_of(block.job).multiply(block.tiling, own.part(index), own.panel(index), own.width(index));
    });
}

// Runs a kernel over all rows and panels, block after block of rows.
template <class KernelOf>
inline void run(const Linear& job, const KernelOf& kernel_of) {
    for (int64_t first = 0; first < job.rows; first += kBlockRows) {
        Block block = {job.part(first, job.rows - first < kBlockRows ? job.rows - first : kBlockRows)};
        run_together(&block, 1, kernel_of);
    }
}

}}}  // namespace quire::QUIRE_ISA
