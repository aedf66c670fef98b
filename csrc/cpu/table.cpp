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

#define QUIRE_ROW(name) {#name, reinterpret_cast<void (*)()>(name)}

extern const Kernel kernels[];
const Kernel kernels[] = {
    QUIRE_ROW(rms_norm),
    QUIRE_ROW(fused_add_rms_norm),
    QUIRE_ROW(silu_and_mul),
    QUIRE_ROW(rotary_embedding),
    {nullptr, nullptr},
};

}}  // namespace quire::QUIRE_ISA
