// SPDX-License-Identifier: Apache-2.0
// Products that an instruction set makes in a way of its own; all others are those of the set on which it stands.

#include "experts.h"
#ifdef __AMX_INT8__
#include "linear_amx_float.h"
#include "linear_amx_int.h"
#include "linear_amx_rows.h"
#endif

namespace quire {

namespace QUIRE_BASE {
int64_t packed_linear(void* out, const void* x, const void* data, const void* scales, const void* zeros, const void* bias,
                      void* scratch, int64_t scratch_bytes, int64_t rows, int64_t outputs, int64_t inputs, int64_t halves,
                      int64_t group, int64_t scales_type, int64_t zeros_type, int64_t activation, int64_t fast,
                      int64_t format);
int64_t experts(void* out, const void* x, const void* chosen, const void* weights, const void* table,
                const int32_t* adapter_rows, const void* adapters, void* scratch, int64_t scratch_bytes, int64_t tokens,
                int64_t top_k, int64_t count, int64_t first, int64_t total, int64_t hidden, int64_t inner, int64_t activation,
                int64_t up_group, int64_t up_scales, int64_t up_zeros, int64_t up_fast, int64_t up_format, int64_t down_group,
                int64_t down_scales, int64_t down_zeros, int64_t down_fast, int64_t down_format);
}

namespace QUIRE_ISA { namespace {

#if defined(__AMX_INT8__)

struct MakeTiledFloat {
    TiledFloatKernel operator()(const Linear& job) const { return {job, {job.weight}}; }
};

struct MakeFewRows {
    FewRowsKernel operator()(const Linear& job) const { return {job, {job.weight}}; }
};

constexpr int64_t kFewestTiledRows = 24;  // of integers

template <class Panels>
struct MakeTiledInt {
    TiledIntKernel<Panels> operator()(const Linear& job) const { return {{job, {job.weight}}}; }
};

// Fewer rows take longer by tiles than by vectors; `rows` are those of a matrix, on the average.
template <class Panels, class Body>
bool with_integers(int64_t rows, Body body) {
    if (rows < kFewestTiledRows) return false;
    body(MakeTiledInt<Panels>{});
    return true;
}

template <class Body>
bool with_bfloat16(int64_t rows, Body body) {
    if (rows <= FewRowsKernel::kMostRows) body(MakeFewRows{});
    else body(MakeTiledFloat{});
    return true;
}

#elif defined(__AVX512BF16__)

template <class Panels, class Body>
bool with_integers(int64_t, Body) { return false; }

template <class Body>
bool with_bfloat16(int64_t, Body body) {
    body(MakeFloat<FloatPanels<BFloat16>, Paired>{});
    return true;
}

#else

template <class Panels, class Body>
bool with_integers(int64_t, Body body) {
    body(MakeInt<Panels>{});
    return true;
}

template <class Body>
bool with_bfloat16(int64_t, Body) { return false; }

#endif

// Calls body with what makes kernels, if this set has any of its own for the fast mode of a format, and says whether.
template <class Body>
bool with_own(const Packing& packing, int64_t rows, Body body) {
    if (packing.format == kBFloat16) return with_bfloat16(rows, body);
    if (packing.is_float() || packing.format == kFp8) return false;
    return with_code_panels(packing, [&](auto of) { return with_integers<typename decltype(of)::type>(rows, body); });
}

bool has_own(const Experts& call, const Matrix& matrix) {
    return matrix.fast && with_own(matrix.packing, call.choices() / call.count, [](auto) {});
}

}  // namespace

int64_t packed_linear(void* out, const void* x, const void* data, const void* scales, const void* zeros, const void* bias,
                      void* scratch, int64_t scratch_bytes, int64_t rows, int64_t outputs, int64_t inputs, int64_t halves,
                      int64_t group, int64_t scales_type, int64_t zeros_type, int64_t activation, int64_t fast,
                      int64_t format) {
    const Linear job = contiguous(
        static_cast<Float32*>(out), static_cast<const Float32*>(x), static_cast<const Float32*>(bias), scratch, rows,
        activation, {data, scales, zeros, outputs, inputs, halves, {group, scales_type, zeros_type, format}});
    const auto run_job = [&](auto kernel_of) { run(job, kernel_of); };
    if (fast && scratch_bytes >= needed_scratch(job) && with_own(job.weight.packing, rows, run_job)) return 0;
    return QUIRE_BASE::packed_linear(out, x, data, scales, zeros, bias, scratch, scratch_bytes, rows, outputs, inputs, halves,
                                     group, scales_type, zeros_type, activation, fast, format);
}

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
    if (!has_own(call, call.up) || !has_own(call, call.down) || scratch_bytes < 4 * ExpertMemory(call).floats ||
        count_refused(call)) {
        return QUIRE_BASE::experts(out, x, chosen, weights, table, adapter_rows, adapters, scratch, scratch_bytes, tokens,
                                   top_k, count, first, total, hidden, inner, activation, up_group, up_scales, up_zeros,
                                   up_fast, up_format,
                                   down_group, down_scales, down_zeros, down_fast, down_format);
    }
    run_experts(call, [&](const Matrix& matrix, Block* blocks, int64_t blocks_count) {
        with_own(matrix.packing, call.choices() / call.count,
                 [=](auto kernel_of) { run_together(blocks, blocks_count, kernel_of); });
    });
    return 0;
}

}}  // namespace quire::QUIRE_ISA
