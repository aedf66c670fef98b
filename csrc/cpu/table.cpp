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

int64_t non_finite_rows(void* out, const void* logits, int64_t rows, int64_t n);
int64_t apply_penalties(void* logits, const void* indices, const void* repetition, const void* subtracted,
                        int64_t count, int64_t size);
int64_t philox_uniform(void* out, const void* seeds, const void* positions, int64_t count);
int64_t sample_tokens(void* out, const void* logits, const void* settings, const void* uniforms, int64_t rows,
                      int64_t n);
int64_t token_logprobs(void* ids, void* logprobs, void* ranks, const void* logits, const void* chosen, int64_t rows,
                       int64_t n, int64_t num_top);

#define QUIRE_ROW(name) {#name, reinterpret_cast<void (*)()>(name)}

extern const Kernel kernels[];
const Kernel kernels[] = {
    QUIRE_ROW(rms_norm),
    QUIRE_ROW(fused_add_rms_norm),
    QUIRE_ROW(silu_and_mul),
    QUIRE_ROW(rotary_embedding),
    QUIRE_ROW(non_finite_rows),
    QUIRE_ROW(apply_penalties),
    QUIRE_ROW(philox_uniform),
    QUIRE_ROW(sample_tokens),
    QUIRE_ROW(token_logprobs),
    {nullptr, nullptr},
};

}}  // namespace quire::QUIRE_ISA
