// SPDX-License-Identifier: Apache-2.0
// Experts: MLPs of which a token is seen by a few, each as its gathered rows times its own packed weights.
//
// Choices are sorted by expert, and runs of experts are computed together, at most kBlockRows rows at a time: those rows are
// all that is ever in scratch memory. A row's products are those of any linear layer, and a token's experts are added up in the
// order of their numbers; so no bit depends on the batch, or on how it is cut into runs. Where adapters change a product, gate
// and up are activated behind it, with the same bits. Ranks that share experts leave what they make of each choice apart, and
// it is added up once all of it is in one place.

#pragma once

#include "linear_int.h"
#include "low_rank.h"

namespace quire { namespace QUIRE_ISA { namespace {

// How all experts' matrices of one place are packed.
struct Matrix {
    Packing packing;
    int64_t fast;
};

// An expert's matrices as its row of the table has them; what is not there is null.
struct ExpertMatrix {
    const void* data;
    const void* scales;
    const void* zeros;
    const Float32* bias;
};
struct Expert { ExpertMatrix up, down; };

// x [T, H]; chosen and weights [T, k]; `up` is gate and up, [2 I, H] in halves, or [I, H] without a gate; `down` is [H, I]. Of
// `total` experts `count` are here, from `first` on; choices of others are left out. out is [T, H], or, without weights,
// [T, k, H]: what each choice's expert made, and zeros for those that are elsewhere. Adapters are those of up and of down, an
// equal part of their slots for each expert that is here, and adapter_rows [T] says which of these; null: there are none.
struct Experts {
    Float32* out;
    const Float32* x;
    const int32_t* chosen;
    const Float32* weights;
    const Expert* table;
    const int32_t* adapter_rows;
    const Stacks* adapters;
    Float32* scratch;
    int64_t tokens, top_k, count, first, total, hidden, inner, activation;
    Matrix up, down;

    int64_t choices() const { return tokens * top_k; }
    int64_t halves() const { return is_gated(activation) ? 2 : 1; }
    bool is_here(int64_t choice) const { return chosen[choice] >= first && chosen[choice] < first + count; }
    int64_t expert(int64_t choice) const { return chosen[choice] - first; }
    int64_t num_adapters() const { return adapters ? adapters[0].slots / count : 0; }
    // Where a choice's adapter has what it adds; negative: nowhere.
    int32_t slot(int64_t choice) const {
        const int32_t adapter = adapters && is_here(choice) ? adapter_rows[choice / top_k] : -1;
        return adapter < 0 ? -1 : static_cast<int32_t>(expert(choice) * num_adapters()) + adapter;
    }
    bool is_adapted() const {
        for (int64_t i = 0; i < choices(); ++i)
            if (slot(i) >= 0 && (adapters[0].changes(slot(i)) || adapters[1].changes(slot(i)))) return true;
        return false;
    }
    Weight up_weight(int64_t expert) const {
        const ExpertMatrix& matrix = table[expert].up;
        return {matrix.data, matrix.scales, matrix.zeros, halves() * inner, hidden, halves(), up.packing};
    }
    Weight down_weight(int64_t expert) const {
        const ExpertMatrix& matrix = table[expert].down;
        return {matrix.data, matrix.scales, matrix.zeros, hidden, inner, 1, down.packing};
    }
};

// Columns of the output that a thread adds to at a time.
constexpr int64_t kColumns = 256;

// The scratch memory: packed activations, what is between the two products, what is behind them, and the sorted choices; where
// there are adapters, what is before activation, and what is theirs.
struct ExpertMemory {
    int64_t row_floats;  // of packed activations
    Float32 *packed, *between, *behind, *raw, *adapting;
    int32_t *order, *ends;
    int64_t floats;

    explicit ExpertMemory(const Experts& call) {
        const int64_t rows = call.choices() < kBlockRows ? call.choices() : kBlockRows;
        const int64_t up = call.up_weight(0).padded(), down = call.down_weight(0).padded();
        row_floats = (up > down ? up : down) + 1;
        packed = call.scratch;
        between = packed + rows * row_floats;
        behind = between + rows * call.inner;
        order = reinterpret_cast<int32_t*>(behind + rows * call.hidden);
        ends = order + call.choices();
        raw = behind + rows * call.hidden + call.choices() + call.count;
        adapting = raw + rows * call.halves() * call.inner;
        floats = rows * (row_floats + call.inner + call.hidden) + call.choices() + call.count;
        if (!call.adapters) return;
        const int64_t of_up = call.adapters[0].scratch(rows), of_down = call.adapters[1].scratch(rows);
        floats += rows * call.halves() * call.inner + (of_up > of_down ? of_up : of_down);
    }
};

inline int64_t count_refused(const Experts& call) {
    int64_t refused = 0;
    for (int64_t i = 0; i < call.choices(); ++i) {
        const bool exists = call.chosen[i] >= 0 && call.chosen[i] < call.total;
        refused += !exists || (call.adapters && call.adapter_rows[i / call.top_k] >= call.num_adapters());
    }
    return refused;
}

// Choices by expert, of one expert by token; `ends` says where each expert's end. Returns how many there are.
inline int64_t sort_choices(const Experts& call, const ExpertMemory& memory) {
    for (int64_t expert = 0; expert < call.count; ++expert) memory.ends[expert] = 0;
    for (int64_t i = 0; i < call.choices(); ++i) {
        if (call.is_here(i)) ++memory.ends[call.expert(i)];
    }
    int32_t begin = 0;
    for (int64_t expert = 0; expert < call.count; ++expert) {
        const int32_t size = memory.ends[expert];
        memory.ends[expert] = begin;
        begin += size;
    }
    for (int64_t i = 0; i < call.choices(); ++i) {
        if (call.is_here(i)) memory.order[memory.ends[call.expert(i)]++] = static_cast<int32_t>(i);
    }
    return begin;
}

// Sorted choices whose rows are computed together: [begin, end), and the experts that they are of.
struct Run {
    int64_t begin = 0, end = 0, blocks = 0;
    Block up[kBlockRows], down[kBlockRows];
    int32_t tokens[kBlockRows], slots[kBlockRows];
    bool adapts;  // whether what up makes is left as it is

    explicit Run(bool adapts) : adapts(adapts) {}

    // Choices from `begin` on: those of whole experts, as many as there is room for, or some of one that has more.
    void fill(const Experts& call, const ExpertMemory& memory, int64_t from, int64_t sorted) {
        begin = end = from, blocks = 0;
        while (end < sorted) {
            const int64_t expert = call.expert(memory.order[end]), left = memory.ends[expert] - end;
            const int64_t room = kBlockRows - (end - begin);
            if (left > room && blocks) break;
            add(call, memory, expert, left < room ? left : room);
        }
    }

private:
    void add(const Experts& call, const ExpertMemory& memory, int64_t expert, int64_t rows) {
        const int64_t at = end - begin;
        for (int64_t i = 0; i < rows; ++i) {
            const int32_t choice = memory.order[end + i];
            tokens[at + i] = static_cast<int32_t>(choice / call.top_k), slots[at + i] = call.slot(choice);
        }
        Float32 *between = memory.between + at * call.inner, *raw = memory.raw + at * call.halves() * call.inner;
        void* packed = memory.packed + at * memory.row_floats;
        const Expert& of = call.table[expert];
        const int64_t activation = adapts ? static_cast<int64_t>(kNone) : call.activation;
        up[blocks].job = contiguous(adapts ? raw : between, call.x, of.up.bias, packed, rows, activation,
                                    call.up_weight(expert), tokens + at);
        down[blocks].job = contiguous(memory.behind + at * call.hidden, between, of.down.bias, packed, rows, kNone,
                                      call.down_weight(expert));
        end += rows, ++blocks;
    }
};

// Adds to what up made what adapters do, and activates it.
inline void adapt_up(const Experts& call, const ExpertMemory& memory, const Run& run) {
    const int64_t rows = run.end - run.begin, n = call.inner;
    add_adapters(call.adapters[0], {memory.raw, call.x, run.slots, rows, run.tokens}, memory.adapting);
    with_ending(call.activation, [&](auto ending) {
        share(rows, kElementWork * rows * n, [&](int64_t row) {
            const Float32 *first = memory.raw + row * call.halves() * n, *second = first + (call.halves() - 1) * n;
            for_each_vector(n, [&](int64_t i, auto lanes) {
                store(memory.between + row * n + i, ending(load(first + i, lanes), load(second + i, lanes)), lanes);
            });
        });
    });
}

inline void adapt_down(const Experts& call, const ExpertMemory& memory, const Run& run) {
    add_adapters(call.adapters[1], {memory.behind, memory.between, run.slots, run.end - run.begin}, memory.adapting);
}

// out += weight * what a choice's expert made, choice after choice; or that alone.
inline void add_run(const Experts& call, const ExpertMemory& memory, const Run& run) {
    const int64_t rows = run.end - run.begin, n = call.hidden;
    share((n + kColumns - 1) / kColumns, kElementWork * rows * n, [&](int64_t part) {
        const int64_t start = part * kColumns, size = n - start < kColumns ? n - start : kColumns;
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t choice = memory.order[run.begin + row];
            const Float32* from = memory.behind + row * n + start;
            if (!call.weights) {
                __builtin_memcpy(call.out + choice * n + start, from, size * sizeof(Float32));
                continue;
            }
            const Vec weight = splat(call.weights[choice].value);
            Float32* to = call.out + run.tokens[row] * n + start;
            for_each_vector(size, [&](int64_t i, auto lanes) {
                store(to + i, fma(weight, load(from + i, lanes), load(to + i, lanes)), lanes);
            });
        }
    });
}

// `multiply` runs blocks of matrices that are packed alike.
template <class Multiply>
inline void run_experts(const Experts& call, const Multiply& multiply) {
    const ExpertMemory memory(call);
    const int64_t rows = call.weights ? call.tokens : call.choices();
    for (int64_t i = 0; i < rows * call.hidden; ++i) call.out[i].value = 0.0f;
    const int64_t sorted = sort_choices(call, memory);
    Run run(call.is_adapted());
    for (int64_t next = 0; next < sorted; next = run.end) {
        run.fill(call, memory, next, sorted);
        multiply(call.up, run.up, run.blocks);
        if (run.adapts) adapt_up(call, memory, run);
        multiply(call.down, run.down, run.blocks);
        if (run.adapts) adapt_down(call, memory, run);
        add_run(call, memory, run);
    }
}

}}}  // namespace quire::QUIRE_ISA
