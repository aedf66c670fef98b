// The function table of one instruction set: a new kernel is a declaration and a row here.

#include "quire_cpu.h"

namespace quire { namespace QUIRE_ISA {

int64_t rms_norm(void* out, const void* x, const void* weight, int64_t outer, int64_t inner, int64_t outer_stride,
                 int64_t inner_stride, int64_t n, float eps, int64_t dtype, int64_t weight_dtype);
int64_t fused_add_rms_norm(void* out, void* total, const void* x, const void* residual, const void* weight,
                           int64_t rows, int64_t n, float eps, int64_t dtype, int64_t weight_dtype);
int64_t silu_and_mul(void* out, const void* x, int64_t rows, int64_t n, int64_t dtype);
int64_t rotary_embedding(void* q, void* k, const int64_t* positions, const void* cos_sin, int64_t tokens,
                         int64_t num_positions, int64_t rot_dim, int64_t q_heads, int64_t q_token_stride,
                         int64_t q_head_stride, int64_t k_heads, int64_t k_token_stride, int64_t k_head_stride,
                         int64_t interleaved, int64_t dtype);
int64_t pack_weight(void* data, void* scales, void* zeros, const void* rows, int64_t outputs, int64_t inputs,
                    int64_t halves, int64_t group, int64_t dtype, int64_t format);
int64_t packed_linear(void* out, const void* x, const void* data, const void* scales, const void* zeros, const void* bias,
                      void* scratch, int64_t scratch_bytes, int64_t rows, int64_t outputs, int64_t inputs, int64_t halves,
                      int64_t group, int64_t activation, int64_t fast, int64_t format);
int64_t packed_embedding(void* out, const int64_t* ids, const void* data, const void* scales, const void* zeros,
                         int64_t count, int64_t outputs, int64_t inputs, int64_t halves, int64_t group, int64_t format);
int64_t peak_fma(void* out, int64_t iterations);
int64_t read_memory(void* out, const void* data, int64_t bytes);

#define QUIRE_ROW(name) {#name, reinterpret_cast<void (*)()>(name)}

extern const Kernel kernels[];
const Kernel kernels[] = {
    QUIRE_ROW(rms_norm),
    QUIRE_ROW(fused_add_rms_norm),
    QUIRE_ROW(silu_and_mul),
    QUIRE_ROW(rotary_embedding),
    QUIRE_ROW(pack_weight),
    QUIRE_ROW(packed_linear),
    QUIRE_ROW(packed_embedding),
    QUIRE_ROW(peak_fma),
    QUIRE_ROW(read_memory),
    {nullptr, nullptr},
};

}}  // namespace quire::QUIRE_ISA
