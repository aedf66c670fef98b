// Products that an instruction set makes in a way of its own; all others are those of the set on which it stands.

#include "experts.h"
#ifdef __AMX_INT8__
#include "linear_amx_float.h"
#include "linear_amx_int.h"
#endif

namespace quire {

namespace QUIRE_BASE {
int64_t packed_linear(void* out, const void* x, const void* data, const void* scales, const void* zeros, const void* bias,
                      void* scratch, int64_t scratch_bytes, int64_t rows, int64_t outputs, int64_t inputs, int64_t halves,
                      int64_t group, int64_t activation, int64_t fast, int64_t format);
int64_t experts(void* out, const void* x, const void* chosen, const void* weights, const void* table, void* scratch,
                int64_t scratch_bytes, int64_t tokens, int64_t top_k, int64_t count, int64_t hidden, int64_t inner,
                int64_t activation, int64_t up_group, int64_t up_fast, int64_t up_format, int64_t down_group,
                int64_t down_fast, int64_t down_format);
}

namespace QUIRE_ISA { namespace {

#if defined(__AMX_INT8__)

struct MakeTiledFloat {
    TiledFloatKernel operator()(const Linear& job) const { return {job, {job.weight}}; }
};

template <class Panels>
struct MakeTiledInt {
    TiledIntKernel<Panels> operator()(const Linear& job) const { return {{job, {job.weight}}}; }
};

// `rows` are those of a matrix, on the average.
template <class Panels, class Body>
bool with_integers(int64_t rows, Body body) {
    if (rows < kTileRows) return false;
    body(MakeTiledInt<Panels>{});
    return true;
}

template <class Body>
bool with_bfloat16(Body body) {
    body(MakeTiledFloat{});
    return true;
}

#elif defined(__AVX512BF16__)

template <class Panels, class Body>
bool with_integers(int64_t, Body) { return false; }

template <class Body>
bool with_bfloat16(Body body) {
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
bool with_bfloat16(Body) { return false; }

#endif

// Calls body with what makes kernels, if this set has any of its own for the fast mode of a format, and says whether.
template <class Body>
bool with_own(int64_t format, bool zeros, int64_t rows, Body body) {
    switch (format) {
        case kBFloat16: return with_bfloat16(body);
        case kInt8: return with_integers<Int8Panels>(rows, body);
        case kInt4:
            return zeros ? with_integers<Int4Panels<true>>(rows, body) : with_integers<Int4Panels<false>>(rows, body);
        default: return false;
    }
}

bool has_own(const Experts& call, const Matrix& matrix) {
    return matrix.fast && with_own(matrix.format, false, call.choices() / call.count, [](auto) {});
}

}  // namespace

int64_t packed_linear(void* out, const void* x, const void* data, const void* scales, const void* zeros, const void* bias,
                      void* scratch, int64_t scratch_bytes, int64_t rows, int64_t outputs, int64_t inputs, int64_t halves,
                      int64_t group, int64_t activation, int64_t fast, int64_t format) {
    const Linear job = contiguous(
        static_cast<Float32*>(out), static_cast<const Float32*>(x), static_cast<const Float32*>(bias), scratch, rows,
        activation, {data, scales, static_cast<const uint8_t*>(zeros), outputs, inputs, halves, group});
    const auto run_job = [&](auto kernel_of) { run(job, kernel_of); };
    if (fast && scratch_bytes >= needed_scratch(job) && with_own(format, zeros, rows, run_job)) return 0;
    return QUIRE_BASE::packed_linear(out, x, data, scales, zeros, bias, scratch, scratch_bytes, rows, outputs, inputs, halves,
                                     group, activation, fast, format);
}

int64_t experts(void* out, const void* x, const void* chosen, const void* weights, const void* table, void* scratch,
                int64_t scratch_bytes, int64_t tokens, int64_t top_k, int64_t count, int64_t hidden, int64_t inner,
                int64_t activation, int64_t up_group, int64_t up_fast, int64_t up_format, int64_t down_group,
                int64_t down_fast, int64_t down_format) {
    const Experts call = {
        static_cast<Float32*>(out), static_cast<const Float32*>(x), static_cast<const int32_t*>(chosen),
        static_cast<const Float32*>(weights), static_cast<const Expert*>(table), static_cast<Float32*>(scratch),
        tokens, top_k, count, hidden, inner, activation, {up_group, up_fast, up_format},
        {down_group, down_fast, down_format}};
    if (!has_own(call, call.up) || !has_own(call, call.down) || scratch_bytes < 4 * ExpertMemory(call).floats ||
        count_refused(call)) {
        return QUIRE_BASE::experts(out, x, chosen, weights, table, scratch, scratch_bytes, tokens, top_k, count, hidden,
                                   inner, activation, up_group, up_fast, up_format, down_group, down_fast, down_format);
    }
    run_experts(call, [&](const Matrix& matrix, Block* blocks, int64_t blocks_count) {
        with_own(matrix.format, blocks->job.weight.zeros, call.choices() / call.count,
                 [=](auto kernel_of) { run_together(blocks, blocks_count, kernel_of); });
    });
    return 0;
}

}}  // namespace quire::QUIRE_ISA
