// Linear layers on packed weights: one entry for all weight formats.

#include "linear_int.h"

namespace quire { namespace QUIRE_ISA {

// Returns -1 for an unknown format, -2 for too little scratch memory.
int64_t packed_linear(void* out, const void* x, const void* data, const void* scales, const void* zeros, const void* bias,
                      void* scratch, int64_t scratch_bytes, int64_t rows, int64_t outputs, int64_t inputs, int64_t halves,
                      int64_t group, int64_t activation, int64_t fast, int64_t format) {
    const Linear job = {
        static_cast<Float32*>(out), static_cast<const Float32*>(x), static_cast<const Float32*>(bias), scratch, rows,
        activation, {data, scales, static_cast<const uint8_t*>(zeros), outputs, inputs, halves, group}};
    if (scratch_bytes < needed_scratch(job)) return -2;
    switch (format) {
        case kFloat32: run_float(job, FloatPanels<Float32>{job.weight}); return 0;
        case kBFloat16:
            if (fast) run_float<Paired>(job, FloatPanels<BFloat16>{job.weight});
            else run_float(job, FloatPanels<BFloat16>{job.weight});
            return 0;
        case kFloat16: run_float(job, FloatPanels<Float16>{job.weight}); return 0;
        case kInt8: run_int(job, Int8Panels{job.weight}, fast != 0); return 0;
        case kInt4:
            if (zeros) run_int(job, Int4Panels<true>{job.weight}, fast != 0);
            else run_int(job, Int4Panels<false>{job.weight}, fast != 0);
            return 0;
        default: return -1;
    }
}

}}  // namespace quire::QUIRE_ISA
