// SPDX-License-Identifier: Apache-2.0
// Products of packed weights, of one matrix at a time, of experts and of heads: one entry each for all weight formats.

#include "codes.h"
#include "experts.h"
#include "per_head.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Calls body with what makes the kernels of a format; -1 if there is no such format.
template <class Body>
int64_t with_format(const Packing& packing, bool fast, Body body) {
    switch (packing.format) {
        case kFloat32: return body(MakeFloat<FloatPanels<Float32>>{});
        case kBFloat16:
            return fast ? body(MakeFloat<FloatPanels<BFloat16>, Paired>{}) : body(MakeFloat<FloatPanels<BFloat16>>{});
        case kFloat16: return body(MakeFloat<FloatPanels<Float16>>{});
        default: break;
    }
    if (packing.format < kFloat32 || packing.format > kInt6) return -1;
    if (!fast || packing.format == kFp8) return body(MakeFloat<WidePanels>{});
    return with_code_panels(packing, [&](auto of) { return body(MakeInt<typename decltype(of)::type>{}); });
}

bool is_format(const Matrix& matrix) {
    return with_format(matrix.packing, false, [](auto) { return int64_t{0}; }) == 0;
}

}  // namespace

// Returns -1 for an unknown format, -2 for too little scratch memory.
int64_t packed_linear(void* out, const void* x, const void* data, const void* scales, const void* zeros, const void* bias,
                      void* scratch, int64_t scratch_bytes, int64_t rows, int64_t outputs, int64_t inputs, int64_t halves,
                      int64_t group, int64_t scales_type, int64_t zeros_type, int64_t activation, int64_t fast,
                      int64_t format) {
    const Linear job = contiguous(
        static_cast<Float32*>(out), static_cast<const Float32*>(x), static_cast<const Float32*>(bias), scratch, rows,
        activation, {data, scales, zeros, outputs, inputs, halves, {group, scales_type, zeros_type, format}});
    if (scratch_bytes < needed_scratch(job)) return -2;
    return with_format(job.weight.packing, fast != 0, [&](auto kernel_of) {
        run(job, kernel_of);
        return int64_t{0};
    });
}

// By plain int8, of activations that are rounded to integers of 8 bits with one step for all of a row. Where they may have zero
// points, code_sums [panels][16] is what the weights' integers come to, else null. Returns as packed_linear.
int64_t rounded_linear(void* out, const void* x, const void* data, const void* scales, const void* code_sums, const void* bias,
                       void* scratch, int64_t scratch_bytes, int64_t rows, int64_t outputs, int64_t inputs, int64_t halves,
                       int64_t group, int64_t scales_type, int64_t zeros_type, float lowest, float bound, float scale,
                       float zero, int64_t asymmetric) {
    const Linear job = contiguous(
        static_cast<Float32*>(out), static_cast<const Float32*>(x), static_cast<const Float32*>(bias), scratch, rows, 0,
        {data, scales, nullptr, outputs, inputs, halves, {group, scales_type, zeros_type, kInt8}});
    if (!job.weight.packing.is_plain_int8()) return -1;
    if (scratch_bytes < needed_scratch(job)) return -2;
    const Rounding how{kIntegers, lowest, bound, scale, zero, asymmetric != 0};
    run(job, MakeStepped{how, static_cast<const Float32*>(code_sums)});
    return 0;
}

// Returns how many choices are of no expert, or of no adapter, in which case nothing is computed; else as packed_linear.
int64_t experts(void* out, const void* x, const void* chosen, const void* weights, const void* table,
                const int32_t* adapter_rows, const void* adapters, void* scratch, int64_t scratch_bytes, int64_t tokens,
                int64_t top_k, int64_t count, int64_t first, int64_t total, int64_t hidden, int64_t inner, int64_t activation,
                int64_t up_group, int64_t up_scales, int64_t up_zeros, int64_t up_fast, int64_t up_format, int64_t down_group,
                int64_t down_scales, int64_t down_zeros, int64_t down_fast, int64_t down_format) {
    const Experts call = {
        static_cast<Float32*>(out), static_cast<const Float32*>(x), static_cast<const int32_t*>(chosen),
        static_cast<const Float32*>(weights), static_cast<const Expert*>(table), adapter_rows,
        static_cast<const Stacks*>(adapters), static_cast<Float32*>(scratch), tokens, top_k, count, first, total, hidden, inner,
        activation, {{up_group, up_scales, up_zeros, up_format}, up_fast},
        {{down_group, down_scales, down_zeros, down_format}, down_fast}};
    if (!is_format(call.up) || !is_format(call.down)) return -1;
    if (scratch_bytes < 4 * ExpertMemory(call).floats) return -2;
    if (const int64_t refused = count_refused(call)) return refused;
    run_experts(call, [](const Matrix& matrix, Block* blocks, int64_t blocks_count) {
        with_format(matrix.packing, matrix.fast != 0, [=](auto kernel_of) {
            run_together(blocks, blocks_count, kernel_of);
            return int64_t{0};
        });
    });
    return 0;
}

// As packed_linear.
int64_t per_head_linear(void* out, const void* x, const void* data, const void* scales, const void* zeros, void* scratch,
                        int64_t scratch_bytes, int64_t tokens, int64_t heads, int64_t token_stride, int64_t head_stride,
                        int64_t outputs, int64_t inputs, int64_t group, int64_t scales_type, int64_t zeros_type,
                        int64_t fast, int64_t format) {
    const PerHead call = {
        static_cast<Float32*>(out), static_cast<const Float32*>(x), scratch, tokens, heads, token_stride, head_stride,
        {data, scales, zeros, outputs, inputs, 1, {group, scales_type, zeros_type, format}}};
    if (scratch_bytes < needed_scratch(call)) return -2;
    return with_format(call.weight.packing, fast != 0, [&](auto kernel_of) {
        run_heads(call, kernel_of);
        return int64_t{0};
    });
}

}}  // namespace quire::QUIRE_ISA
