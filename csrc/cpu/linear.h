// The loop nest around every linear kernel, and what is done with its sums.
//
// Each output is one chain over k in order, whatever the number of rows, blocks or threads: rows and panels only say which
// chains advance together, and a block of k continues the chains that the block before it left in memory.

#pragma once

#include <type_traits>

#include "panels.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Most rows whose sums with a panel stay in registers: of floats, and of integers, whose weights take more of them.
#ifdef __AVX512F__
constexpr int kFloatRows = 12, kIntRows = 12;
#else
constexpr int kFloatRows = 6, kIntRows = 4;
#endif

constexpr int64_t kBlockRows = 192;  // activations that are packed together and walked panel after panel
constexpr int64_t kUnitPanels = 4;  // most panels that a thread works on together

// Multiply-adds that take as long as waking a thread.
constexpr int64_t kParallelProducts = 1 << 19;

enum Activation : int64_t { kNone = 0, kSiluAndMul = 1 };

// out [M, N], or [M, N / 2] where halves are combined; x [M, K]; bias [N] or null; all float32.
struct Linear {
    Float32* out;
    const Float32* x;
    const Float32* bias;
    void* scratch;
    int64_t rows;
    int64_t activation;
    Weight weight;
};

// Rows cut as evenly as possible into tiles of at most `most`.
struct Tiling {
    int64_t rows, tiles;
    Tiling(int64_t rows, int64_t most) : rows(rows), tiles((rows + most - 1) / most) {}
    int64_t start(int64_t tile) const { return tile * (rows / tiles) + (tile < rows % tiles ? tile : rows % tiles); }
    int64_t size(int64_t tile) const { return start(tile + 1) - start(tile); }
};

// Calls body(integral constant R) for 1 <= rows <= most.
template <int most, class Body>
inline void with_rows(int64_t rows, Body body) {
    if constexpr (most == 1) body(std::integral_constant<int, 1>{});
    else if (rows == most) body(std::integral_constant<int, most>{});
    else with_rows<most - 1>(rows, body);
}

// Calls body(integral constant P, panel) for `count` panels, as many at once as R rows of `most` leave registers for.
template <int R, int most, class Body>
inline void for_panels(int64_t count, Body body) {
    constexpr int P = R == 1 ? 4 : 2 * R <= most ? 2 : 1;
    int64_t panel = 0;
    for (; panel + P <= count; panel += P) body(std::integral_constant<int, P>{}, panel);
    for (; P > 1 && panel < count; ++panel) body(std::integral_constant<int, 1>{}, panel);
}

inline void store_some(Float32* out, Vec v, int64_t count) {
    if (count >= kLanes) store(out, v, All{});
    else if (count > 0) store(out, v, First{count});
}

// A unit's sums for one row: sums [panels][16], still without bias; writes what exists of them.
inline void finish_row(const Linear& job, int64_t row, int64_t panel, int64_t panels, Float32* sums) {
    const Weight& weight = job.weight;
    for (int64_t p = 0; job.bias && p < panels; ++p) {
        const int64_t count = weight.count(panel + p);
        for_each_vector(count, [&](int64_t i, auto lanes) {
            Float32* at = sums + p * kPanel + i;
            store(at, load(at, lanes) + load(job.bias + weight.row(panel + p) + i, lanes), lanes);
        });
    }
    if (job.activation == kSiluAndMul) {
        for (int64_t p = 0; p < panels; p += 2) {
            const Float32 *gate = sums + p * kPanel, *up = gate + kPanel;
            for_each_vector(weight.count(panel + p), [&](int64_t i, auto lanes) {
                const Vec value = silu(load(gate + i, All{})) * load(up + i, All{});
                store(job.out + row * weight.half() + weight.row(panel + p) + i, value, lanes);
            });
        }
        return;
    }
    for (int64_t p = 0; p < panels; ++p) {
        Float32* out = job.out + row * weight.outputs + weight.row(panel + p);
        store_some(out, load(sums + p * kPanel, All{}), weight.count(panel + p));
        store_some(out + kLanes, load(sums + p * kPanel + kLanes, All{}), weight.count(panel + p) - kLanes);
    }
}

// Runs a kernel over all rows and panels. The kernel packs a tile of rows, and then makes the sums of a unit of panels
// for a block of packed rows.
template <class Kernel>
inline void run(const Linear& job, const Kernel& kernel) {
    const int64_t panels = job.weight.panels();
    const int64_t unit = job.rows == 1 ? kUnitPanels : 2;
    const int64_t units = (panels + unit - 1) / unit;
    const bool parallel = job.rows * job.weight.outputs * job.weight.inputs >= kParallelProducts;
#pragma omp parallel if (parallel)
    for (int64_t first = 0; first < job.rows; first += kBlockRows) {
        const Tiling tiling(job.rows - first < kBlockRows ? job.rows - first : kBlockRows, Kernel::kMostRows);
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiling.tiles; ++tile) kernel.pack(first, tiling, tile);
#pragma omp for schedule(static)
        for (int64_t index = 0; index < units; ++index) {
            const int64_t panel = index * unit, count = panels - panel < unit ? panels - panel : unit;
            kernel.multiply(first, tiling, panel, count);
        }
    }
}

}}}  // namespace quire::QUIRE_ISA
