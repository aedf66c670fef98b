// Products that an instruction set makes in a way of its own; all others are those of the set on which it stands.

#include "linear_int.h"
#ifdef __AMX_INT8__
#include "linear_amx_float.h"
#include "linear_amx_int.h"
#endif

namespace quire {

namespace QUIRE_BASE {
int64_t packed_linear(void* out, const void* x, const void* data, const void* scales, const void* zeros, const void* bias,
                      void* scratch, int64_t scratch_bytes, int64_t rows, int64_t outputs, int64_t inputs, int64_t halves,
                      int64_t group, int64_t activation, int64_t fast, int64_t format);
}

namespace QUIRE_ISA { namespace {

#if defined(__AMX_INT8__)

template <class Panels>
bool multiply_integers(const Linear& job, Panels panels) {
    if (job.rows < kTileRows) return false;
    run(job, TiledIntKernel<Panels>{{job, panels}});
    return true;
}

bool multiply_bfloat16(const Linear& job) {
    run(job, TiledFloatKernel{job, FloatPanels<BFloat16>{job.weight}});
    return true;
}

#elif defined(__AVX512BF16__)

template <class Panels>
bool multiply_integers(const Linear&, Panels) { return false; }

bool multiply_bfloat16(const Linear& job) {
    run_float<Paired>(job, FloatPanels<BFloat16>{job.weight});
    return true;
}

#else

template <class Panels>
bool multiply_integers(const Linear& job, Panels panels) {
    run(job, IntKernel<Panels>{job, panels});
    return true;
}

bool multiply_bfloat16(const Linear&) { return false; }

#endif

// Whether this set has a way of its own, and it was gone.
bool multiply(const Linear& job, int64_t format) {
    switch (format) {
        case kBFloat16: return multiply_bfloat16(job);
        case kInt8: return multiply_integers(job, Int8Panels{job.weight});
        case kInt4:
            return job.weight.zeros ? multiply_integers(job, Int4Panels<true>{job.weight})
                                    : multiply_integers(job, Int4Panels<false>{job.weight});
        default: return false;
    }
}

}  // namespace

int64_t packed_linear(void* out, const void* x, const void* data, const void* scales, const void* zeros, const void* bias,
                      void* scratch, int64_t scratch_bytes, int64_t rows, int64_t outputs, int64_t inputs, int64_t halves,
                      int64_t group, int64_t activation, int64_t fast, int64_t format) {
    const Linear job = {
        static_cast<Float32*>(out), static_cast<const Float32*>(x), static_cast<const Float32*>(bias), scratch, rows,
        activation, {data, scales, static_cast<const uint8_t*>(zeros), outputs, inputs, halves, group}};
    if (fast && scratch_bytes >= needed_scratch(job) && multiply(job, format)) return 0;
    return QUIRE_BASE::packed_linear(out, x, data, scales, zeros, bias, scratch, scratch_bytes, rows, outputs, inputs, halves,
                                     group, activation, fast, format);
}

}}  // namespace quire::QUIRE_ISA
