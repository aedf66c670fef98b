// SPDX-License-Identifier: Apache-2.0
// The function table of one instruction set: a new kernel is a declaration and a row here. A set that only multiplies matrices
// in another way has that kernel alone, and shares all others with the set below it.

#include "float_mode.h"
#include "quire_cpu.h"

#include <cstddef>
#include <type_traits>
#include <utility>

namespace quire { namespace QUIRE_ISA {

int64_t rms_norm(void* out, const void* x, const void* weight, int64_t outer, int64_t inner, int64_t outer_stride,
                 int64_t inner_stride, int64_t n, float eps, int64_t dtype, int64_t weight_dtype);
int64_t fused_add_rms_norm(void* out, void* total, const void* x, const void* residual, const void* weight,
                           int64_t rows, int64_t n, float eps, int64_t dtype, int64_t weight_dtype);
int64_t silu_and_mul(void* out, const void* x, int64_t rows, int64_t n, int64_t dtype);
int64_t activate(void* out, const void* x, int64_t size, int64_t function, int64_t dtype);
int64_t round_rows(void* out, const void* x, int64_t rows, int64_t inputs, int64_t group, int64_t codes, float lowest,
                   float bound, float scale, float zero, int64_t asymmetric);
int64_t rotary_embedding(void* q, void* k, const int64_t* positions, const void* cos_sin, int64_t tokens,
                         int64_t num_positions, int64_t rot_dim, int64_t q_heads, int64_t q_token_stride,
                         int64_t q_head_stride, int64_t k_heads, int64_t k_token_stride, int64_t k_head_stride,
                         int64_t interleaved, int64_t dtype);
int64_t pack_weight(void* data, void* scales, void* zeros, const void* rows, int64_t outputs, int64_t inputs,
                    int64_t halves, int64_t group, int64_t scales_type, int64_t zeros_type, int64_t dtype, int64_t format);
int64_t packed_linear(void* out, const void* x, const void* data, const void* scales, const void* zeros, const void* bias,
                      void* scratch, int64_t scratch_bytes, int64_t rows, int64_t outputs, int64_t inputs, int64_t halves,
                      int64_t group, int64_t scales_type, int64_t zeros_type, int64_t activation, int64_t fast,
                      int64_t format);
int64_t rounded_linear(void* out, const void* x, const void* data, const void* scales, const void* code_sums, const void* bias,
                       void* scratch, int64_t scratch_bytes, int64_t rows, int64_t outputs, int64_t inputs, int64_t halves,
                       int64_t group, int64_t scales_type, int64_t zeros_type, float lowest, float bound, float scale,
                       float zero, int64_t asymmetric);
int64_t low_rank_linear(void* out, const void* x, const int32_t* adapter_rows, const void* adapters, void* scratch,
                    int64_t scratch_bytes, int64_t rows);
int64_t experts(void* out, const void* x, const void* chosen, const void* weights, const void* table,
                const int32_t* adapter_rows, const void* adapters, void* scratch, int64_t scratch_bytes, int64_t tokens,
                int64_t top_k, int64_t count, int64_t first, int64_t total, int64_t hidden, int64_t inner, int64_t activation,
                int64_t up_group, int64_t up_scales, int64_t up_zeros, int64_t up_fast, int64_t up_format, int64_t down_group,
                int64_t down_scales, int64_t down_zeros, int64_t down_fast, int64_t down_format);
int64_t add_choices(void* out, const void* rows, const void* chosen, const void* weights, int64_t tokens, int64_t top_k,
                    int64_t hidden);
int64_t route(void* chosen, void* weights, const void* logits, const void* bias, int64_t rows, int64_t count,
              int64_t top_k, int64_t kind, int64_t groups, int64_t top_groups, int64_t group_members, int64_t normalized,
              float scale, float reach, int64_t dtype);
int64_t causal_conv(void* out, const void* x, const void* weight, const void* bias, void* states, const int32_t* starts,
                    const int32_t* lengths, const int32_t* kept, const int32_t* tables, int64_t rows, int64_t requests,
                    int64_t table_width, int64_t block_size, int64_t num_blocks, int64_t block_stride, int64_t x_stride,
                    int64_t channels, int64_t taps, int64_t is_silu);
int64_t selective_scan(void* out, const void* x, const void* dt, const void* a, const void* b, const void* c, const void* skip,
                       const void* gate, void* states, const int32_t* starts, const int32_t* lengths, const int32_t* kept,
                       const int32_t* tables, int64_t rows, int64_t requests, int64_t table_width, int64_t block_size,
                       int64_t num_blocks, int64_t block_stride, int64_t x_stride, int64_t dt_stride, int64_t b_stride,
                       int64_t c_stride, int64_t gate_stride, int64_t channels, int64_t count);
int64_t ssd_scan(void* out, const void* x, const void* dt, const void* a, const void* b, const void* c, const void* skip,
                 const void* dt_bias, const void* gate, void* states, const int32_t* starts, const int32_t* lengths,
                 const int32_t* kept, const int32_t* tables, int64_t rows, int64_t requests, int64_t table_width,
                 int64_t block_size, int64_t num_blocks, int64_t block_stride, int64_t x_stride, int64_t dt_stride,
                 int64_t b_stride, int64_t c_stride, int64_t gate_stride, int64_t heads, int64_t size, int64_t groups,
                 int64_t count, float least_time, float most_time);
int64_t gated_delta(void* out, const void* qkv, const void* ba, const void* rates, const void* bias, void* states,
                    void* gates, void* decays, const int32_t* starts, const int32_t* lengths, const int32_t* kept,
                    const int32_t* tables, int64_t rows, int64_t requests, int64_t table_width, int64_t block_size,
                    int64_t num_blocks, int64_t stride, int64_t key_heads, int64_t value_heads, int64_t keys,
                    int64_t values, int64_t steps, float strongest, float least);
int64_t rg_lru(void* out, const void* x, const void* weights, const void* bias, const void* rates, void* states, void* gates,
               const int32_t* starts, const int32_t* lengths, const int32_t* kept, const int32_t* tables, int64_t rows,
               int64_t requests, int64_t table_width, int64_t block_size, int64_t num_blocks, int64_t stride, int64_t heads,
               int64_t size);
int64_t rwkv7(void* out, const void* r, const void* w, const void* k, const void* v, const void* a, const void* of_heads,
              void* states, void* scratch, const int32_t* starts, const int32_t* lengths, const int32_t* kept,
              const int32_t* tables, int64_t rows, int64_t requests, int64_t table_width, int64_t block_size,
              int64_t num_blocks, int64_t stride, int64_t heads, int64_t size, float eps);
int64_t packed_embedding(void* out, const int64_t* ids, const void* data, const void* scales, const void* zeros,
                         int64_t count, int64_t outputs, int64_t inputs, int64_t halves, int64_t group,
                         int64_t scales_type, int64_t zeros_type, int64_t format);
int64_t layer_norm(void* out, const void* x, const void* weight, const void* bias, int64_t outer, int64_t inner,
                   int64_t outer_stride, int64_t inner_stride, int64_t n, float eps, int64_t dtype,
                   int64_t weight_dtype);
int64_t fused_add_layer_norm(void* out, void* total, const void* x, const void* residual, const void* weight,
                             const void* bias, int64_t rows, int64_t n, float eps, int64_t dtype, int64_t weight_dtype);
int64_t gelu_and_mul(void* out, const void* x, int64_t rows, int64_t n, int64_t use_tanh, int64_t dtype);
int64_t embedding(void* out, const int64_t* ids, const void* table, int64_t tokens, int64_t num_rows,
                  int64_t row_bytes);
int64_t write_kv(void* k, void* v, void* k_cache, void* v_cache, const int64_t* slots, const float* scales,
                 int64_t tokens, int64_t heads, int64_t k_token_stride, int64_t k_head_stride, int64_t v_token_stride, int64_t v_head_stride,
                 int64_t num_blocks, int64_t block_size, int64_t head_size, int64_t dtype, int64_t cache_dtype);
int64_t rotary_and_write_kv(void* q, void* k, void* v, void* k_cache, void* v_cache, const int64_t* positions,
                            const void* cos_sin, const int64_t* slots, const float* scales, const void* q_norm,
                            const void* k_norm, int64_t tokens, int64_t num_positions, int64_t rot_dim, int64_t q_heads,
                            int64_t q_token_stride, int64_t q_head_stride, int64_t heads, int64_t k_token_stride,
                            int64_t k_head_stride, int64_t v_token_stride, int64_t v_head_stride, int64_t num_blocks,
                            int64_t block_size, int64_t head_size, int64_t interleaved, float eps, int64_t dtype,
                            int64_t cache_dtype, int64_t norm_dtype);
int64_t paged_attention(void* out, const void* q, const void* k_cache, const void* v_cache, const int32_t* starts,
                        const int32_t* lengths, const int32_t* tables, const float* slopes, const float* sinks,
                        const int32_t* last_seen, const float* biases, int64_t tokens, int64_t requests,
                        int64_t table_width, int64_t q_heads, int64_t token_stride, int64_t head_stride,
                        int64_t num_blocks, int64_t heads, int64_t block_size, int64_t head_size,
                        int64_t window, int64_t chunked, int64_t center, float scale, float soft_cap, int64_t dtype,
                        int64_t cache_dtype);
int64_t bidirectional_attention(void* out, const void* q, const void* k, const void* v, const int32_t* starts,
                                const int32_t* lengths, const float* slopes, const float* biases, int64_t tokens,
                                int64_t requests, int64_t q_heads, int64_t q_token_stride, int64_t q_head_stride,
                                int64_t heads, int64_t k_token_stride, int64_t k_head_stride, int64_t v_token_stride,
                                int64_t v_head_stride, int64_t head_size, int64_t window, int64_t center, float scale,
                                int64_t dtype);
int64_t accumulate(void* vectors, const void* x, const int64_t* chunks, int64_t requests, int64_t tokens, int64_t n,
                   int64_t stride, int64_t rows, int64_t reduction, int64_t dtype);
int64_t per_head_linear(void* out, const void* x, const void* data, const void* scales, const void* zeros, void* scratch,
                        int64_t scratch_bytes, int64_t tokens, int64_t heads, int64_t token_stride, int64_t head_stride,
                        int64_t outputs, int64_t inputs, int64_t group, int64_t scales_type, int64_t zeros_type,
                        int64_t fast, int64_t format);
int64_t write_latents(void* q, const void* rows, const void* norm, const int64_t* positions, const void* cos_sin, void* cache,
                      const int64_t* slots, int64_t tokens, int64_t num_positions, int64_t rank, int64_t rope, int64_t heads,
                      int64_t q_token_stride, int64_t q_head_stride, int64_t row_stride, int64_t num_slots,
                      int64_t interleaved, float eps, int64_t dtype, int64_t cache_dtype, int64_t norm_dtype);
int64_t latent_attention(void* out, const void* q, const void* q_rope, const void* cache, const int32_t* starts,
                         const int32_t* lengths, const int32_t* tables, int64_t tokens, int64_t requests,
                         int64_t table_width, int64_t heads, int64_t token_stride, int64_t head_stride,
                         int64_t rope_token_stride, int64_t rope_head_stride, int64_t num_blocks, int64_t block_size,
                         int64_t rank, int64_t rope, float scale, int64_t dtype, int64_t cache_dtype);
int64_t all_reduce(void* out, const void* x, void* segment, int64_t rank, int64_t size, int64_t dtype);
int64_t all_gather(void* out, const void* x, void* segment, int64_t rank, int64_t rows, int64_t bytes);
int64_t all_to_all(void* out, const void* x, void* segment, const int64_t* counts, int64_t rank, int64_t row_bytes);
int64_t peak_fma(void* out, int64_t iterations);
int64_t read_memory(void* out, const void* data, int64_t bytes);

int64_t unusable_rows(void* out, const void* logits, int64_t rows, int64_t n);
int64_t mask_logits(void* logits, const void* rows, const void* words, int64_t count, int64_t num_rows, int64_t n);
int64_t apply_penalties(void* logits, const void* indices, const void* repetition, const void* subtracted,
                        int64_t count, int64_t size);
int64_t philox_uniform(void* out, const void* seeds, const void* positions, int64_t count);
int64_t sample_tokens(void* out, const void* logits, const void* settings, const void* uniforms, int64_t rows,
                      int64_t n);
int64_t token_logprobs(void* ids, void* logprobs, void* ranks, const void* logits, const void* chosen, int64_t rows,
                       int64_t n, int64_t num_top);

namespace {

// An argument from its slot of eight bytes: a float comes as a double.
template <class T>
inline T unpack(const char* slot) {
    std::conditional_t<std::is_same_v<T, float>, double, T> value;
    static_assert(sizeof value == 8, "arguments are pointers, int64_t and float");
    __builtin_memcpy(&value, slot, sizeof value);
    return static_cast<T>(value);
}

// Whether an argument is no address, or a multiple of `alignment`, a power of two.
template <class T>
inline bool is_aligned(const char* slot, int64_t alignment) {
    return !std::is_pointer_v<T> || (unpack<int64_t>(slot) & (alignment - 1)) == 0;
}

template <class T>
constexpr char letter = std::is_pointer_v<T> ? 'P' : std::is_same_v<T, int64_t> ? 'q' : 'd';

// A kernel as a function of one packed argument, because Python pays for each argument of a foreign call.
template <auto kernel> struct Packed;
template <class... Args, int64_t (*kernel)(Args...)>
struct Packed<kernel> {
    static constexpr char signature[] = {letter<Args>..., 0};

    static int64_t call(const char* slots) {
        return call(slots + 8, unpack<int64_t>(slots), std::index_sequence_for<Args...>{});
    }

private:
    template <size_t... i>
    static int64_t call(const char* slots, int64_t alignment, std::index_sequence<i...>) {
        if (!(is_aligned<Args>(slots + 8 * i, alignment) && ...)) return kMisaligned;
        const FloatMode mode;
        return kernel(unpack<Args>(slots + 8 * i)...);
    }
};

}  // namespace

#define QUIRE_ROW(name) {#name, Packed<name>::call, Packed<name>::signature}

extern const Kernel kernels[];
const Kernel kernels[] = {
    QUIRE_ROW(packed_linear),
    QUIRE_ROW(experts),
#ifndef QUIRE_BASE
    QUIRE_ROW(rms_norm),
    QUIRE_ROW(fused_add_rms_norm),
    QUIRE_ROW(activate),
    QUIRE_ROW(silu_and_mul),
    QUIRE_ROW(round_rows),
    QUIRE_ROW(rounded_linear),
    QUIRE_ROW(rotary_embedding),
    QUIRE_ROW(pack_weight),
    QUIRE_ROW(packed_embedding),
    QUIRE_ROW(low_rank_linear),
    QUIRE_ROW(add_choices),
    QUIRE_ROW(route),
    QUIRE_ROW(causal_conv),
    QUIRE_ROW(selective_scan),
    QUIRE_ROW(ssd_scan),
    QUIRE_ROW(gated_delta),
    QUIRE_ROW(rg_lru),
    QUIRE_ROW(rwkv7),
    QUIRE_ROW(layer_norm),
    QUIRE_ROW(fused_add_layer_norm),
    QUIRE_ROW(gelu_and_mul),
    QUIRE_ROW(embedding),
    QUIRE_ROW(write_kv),
    QUIRE_ROW(rotary_and_write_kv),
    QUIRE_ROW(paged_attention),
    QUIRE_ROW(bidirectional_attention),
    QUIRE_ROW(accumulate),
    QUIRE_ROW(per_head_linear),
    QUIRE_ROW(write_latents),
    QUIRE_ROW(latent_attention),
    QUIRE_ROW(all_reduce),
    QUIRE_ROW(all_gather),
    QUIRE_ROW(all_to_all),
    QUIRE_ROW(unusable_rows),
    QUIRE_ROW(mask_logits),
    QUIRE_ROW(apply_penalties),
    QUIRE_ROW(philox_uniform),
    QUIRE_ROW(sample_tokens),
    QUIRE_ROW(token_logprobs),
    QUIRE_ROW(peak_fma),
    QUIRE_ROW(read_memory),
#endif
    {nullptr, nullptr, nullptr},
};

}}  // namespace quire::QUIRE_ISA
