// Products of packed weights, of one matrix at a time, of experts and of heads: one entry each for all weight formats.

#include "experts.h"
#include "per_head.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Calls body with what makes the kernels of a format; -1 if there is no such format.
template <class Body>
int64_t with_format(int64_t format, bool fast, bool zeros, Body body) {
    const auto either = [&](auto in_fast, auto in_precise) { return fast ? body(in_fast) : body(in_precise); };
    switch (format) {
        case kFloat32: return body(MakeFloat<FloatPanels<Float32>>{});
        case kBFloat16: return either(MakeFloat<FloatPanels<BFloat16>, Paired>{}, MakeFloat<FloatPanels<BFloat16>>{});
        case kFloat16: return body(MakeFloat<FloatPanels<Float16>>{});
        case kInt8: return either(MakeInt<Int8Panels>{}, MakeFloat<Int8Panels>{});
        case kInt4:
            if (zeros) return either(MakeInt<Int4Panels<true>>{}, MakeFloat<Int4Panels<true>>{});
            return either(MakeInt<Int4Panels<false>>{}, MakeFloat<Int4Panels<false>>{});
        default: return -1;
    }
}

bool is_format(const Matrix& matrix) {
    return with_format(matrix.format, false, false, [](auto) { return int64_t{0}; }) == 0;
}

}  // namespace

// Returns -1 for an unknown format, -2 for too little scratch memory.
int64_t packed_linear(void* out, const void* x, const void* data, const void* scales, const void* zeros, const void* bias,
                      void* scratch, int64_t scratch_bytes, int64_t rows, int64_t outputs, int64_t inputs, int64_t halves,
                      int64_t group, int64_t activation, int64_t fast, int64_t format) {
    const Linear job = contiguous(
        static_cast<Float32*>(out), static_cast<const Float32*>(x), static_cast<const Float32*>(bias), scratch, rows,
        activation, {data, scales, static_cast<const uint8_t*>(zeros), outputs, inputs, halves, group});
    if (scratch_bytes < needed_scratch(job)) return -2;
    return with_format(format, fast != 0, zeros != nullptr, [&](auto kernel_of) {
        run(job, kernel_of);
        return int64_t{0};
    });
}

// Returns how many choices are of no expert, in which case nothing is computed; else as packed_linear.
int64_t experts(void* out, const void* x, const void* chosen, const void* weights, const void* table, void* scratch,
                int64_t scratch_bytes, int64_t tokens, int64_t top_k, int64_t count, int64_t hidden, int64_t inner,
                int64_t activation, int64_t up_group, int64_t up_fast, int64_t up_format, int64_t down_group,
                int64_t down_fast, int64_t down_format) {
    const Experts call = {
        static_cast<Float32*>(out), static_cast<const Float32*>(x), static_cast<const int32_t*>(chosen),
        static_cast<const Float32*>(weights), static_cast<const Expert*>(table), static_cast<Float32*>(scratch),
        tokens, top_k, count, hidden, inner, activation, {up_group, up_fast, up_format},
        {down_group, down_fast, down_format}};
    if (!is_format(call.up) || !is_format(call.down)) return -1;
    if (scratch_bytes < 4 * ExpertMemory(call).floats) return -2;
    if (const int64_t refused = count_refused(call)) return refused;
    run_experts(call, [](const Matrix& matrix, Block* blocks, int64_t blocks_count) {
        const bool zeros = blocks->job.weight.zeros != nullptr;
        with_format(matrix.format, matrix.fast != 0, zeros, [=](auto kernel_of) {
            run_together(blocks, blocks_count, kernel_of);
            return int64_t{0};
        });
    });
    return 0;
}

// As packed_linear.
int64_t per_head_linear(void* out, const void* x, const void* data, const void* scales, const void* zeros, void* scratch,
                        int64_t scratch_bytes, int64_t tokens, int64_t heads, int64_t token_stride, int64_t head_stride,
                        int64_t outputs, int64_t inputs, int64_t group, int64_t fast, int64_t format) {
    const PerHead call = {
        static_cast<Float32*>(out), static_cast<const Float32*>(x), scratch, tokens, heads, token_stride, head_stride,
        {data, scales, static_cast<const uint8_t*>(zeros), outputs, inputs, 1, group}, format};
    if (scratch_bytes < needed_scratch(call)) return -2;
    return with_format(format, fast != 0, zeros != nullptr, [&](auto kernel_of) {
        run_heads(call, kernel_of);
        return int64_t{0};
    });
}

}}  // namespace quire::QUIRE_ISA
