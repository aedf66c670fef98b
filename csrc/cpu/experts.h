// Experts: MLPs of which a token is seen by a few, each as its gathered rows times its own packed weights.
//
// Choices are sorted by expert, and runs of experts are computed together, at most kBlockRows rows at a time: those rows are
// all that is ever in scratch memory. A row's products are those of any linear layer, and a token's experts are added up in the
// order of their numbers; so no bit depends on the batch, or on how it is cut into runs.

#pragma once

#include "linear_int.h"

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

// out, x [T, H]; chosen and weights [T, k]; `up` is gate and up, [2 I, H] in halves, or [I, H] without a gate; `down` is [H, I].
struct Experts {
    Float32* out;
    const Float32* x;
    const int32_t* chosen;
    const Float32* weights;
    const Expert* table;
    Float32* scratch;
    int64_t tokens, top_k, count, hidden, inner, activation;
    Matrix up, down;

    int64_t choices() const { return tokens * top_k; }
    Weight up_weight(int64_t expert) const {
        const ExpertMatrix& matrix = table[expert].up;
        const int64_t halves = is_gated(activation) ? 2 : 1;
        return {matrix.data, matrix.scales, matrix.zeros, halves * inner, hidden, halves, up.packing};
    }
    Weight down_weight(int64_t expert) const {
        const ExpertMatrix& matrix = table[expert].down;
        return {matrix.data, matrix.scales, matrix.zeros, hidden, inner, 1, down.packing};
    }
};

// Columns of the output that a thread adds to at a time.
constexpr int64_t kColumns = 256;

// The scratch memory: packed activations, what is between the two products, what is behind them, and the sorted choices.
struct ExpertMemory {
    int64_t row_floats;  // of packed activations
    Float32 *packed, *between, *behind;
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
        floats = rows * (row_floats + call.inner + call.hidden) + call.choices() + call.count;
    }
};

inline int64_t count_refused(const Experts& call) {
    int64_t refused = 0;
    for (int64_t i = 0; i < call.choices(); ++i) refused += call.chosen[i] < 0 || call.chosen[i] >= call.count;
    return refused;
}

// Choices by expert, of one expert by token; `ends` says where each expert's end.
inline void sort_choices(const Experts& call, const ExpertMemory& memory) {
    for (int64_t expert = 0; expert < call.count; ++expert) memory.ends[expert] = 0;
    for (int64_t i = 0; i < call.choices(); ++i) ++memory.ends[call.chosen[i]];
    int32_t begin = 0;
    for (int64_t expert = 0; expert < call.count; ++expert) {
        const int32_t size = memory.ends[expert];
        memory.ends[expert] = begin;
        begin += size;
    }
    for (int64_t i = 0; i < call.choices(); ++i) memory.order[memory.ends[call.chosen[i]]++] = static_cast<int32_t>(i);
}

// Sorted choices whose rows are computed together: [begin, end), and the experts that they are of.
struct Run {
    int64_t begin = 0, end = 0, blocks = 0;
    Block up[kBlockRows], down[kBlockRows];
    int32_t tokens[kBlockRows];

    // Choices from `begin` on: those of whole experts, as many as there is room for, or some of one that has more.
    void fill(const Experts& call, const ExpertMemory& memory, int64_t first) {
        begin = end = first, blocks = 0;
        while (end < call.choices()) {
            const int64_t expert = call.chosen[memory.order[end]], left = memory.ends[expert] - end;
            const int64_t room = kBlockRows - (end - begin);
            if (left > room && blocks) break;
            add(call, memory, expert, left < room ? left : room);
        }
    }

private:
    void add(const Experts& call, const ExpertMemory& memory, int64_t expert, int64_t rows) {
        const int64_t at = end - begin;
        for (int64_t i = 0; i < rows; ++i) tokens[at + i] = static_cast<int32_t>(memory.order[end + i] / call.top_k);
        Float32* between = memory.between + at * call.inner;
        void* packed = memory.packed + at * memory.row_floats;
        const Expert& of = call.table[expert];
        up[blocks].job =
            contiguous(between, call.x, of.up.bias, packed, rows, call.activation, call.up_weight(expert), tokens + at);
        down[blocks].job = contiguous(memory.behind + at * call.hidden, between, of.down.bias, packed, rows, kNone,
                                      call.down_weight(expert));
        end += rows, ++blocks;
    }
};

// out += weight * what a choice's expert made, choice after choice.
inline void add_run(const Experts& call, const ExpertMemory& memory, const Run& run) {
    const int64_t rows = run.end - run.begin, n = call.hidden;
    share((n + kColumns - 1) / kColumns, kElementWork * rows * n, [&](int64_t part) {
        const int64_t start = part * kColumns, size = n - start < kColumns ? n - start : kColumns;
        for (int64_t row = 0; row < rows; ++row) {
            const Vec weight = splat(call.weights[memory.order[run.begin + row]].value);
            const Float32* from = memory.behind + row * n + start;
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
    for (int64_t i = 0; i < call.tokens * call.hidden; ++i) call.out[i].value = 0.0f;
    sort_choices(call, memory);
    Run run;
    for (int64_t next = 0; next < call.choices(); next = run.end) {
        run.fill(call, memory, next);
        multiply(call.up, run.up, run.blocks);
        multiply(call.down, run.down, run.blocks);
        add_run(call, memory, run);
    }
}

}}}  // namespace quire::QUIRE_ISA
