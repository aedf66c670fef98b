// Probing the processor, looking kernels up, and running many of them at a time. Compiled without raised instruction-set flags, like all shared code.

#include "quire_cpu.h"

#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __linux__
#include <sched.h>
#endif

namespace quire {

namespace avx512bf16 { extern const Kernel kernels[]; }
namespace avx512 { extern const Kernel kernels[]; }
namespace avx2 { extern const Kernel kernels[]; }
namespace portable { extern const Kernel kernels[]; }

namespace {

[[maybe_unused]] bool always() { return true; }

#ifdef __x86_64__
bool has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

[[maybe_unused]] bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

[[maybe_unused]] bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

struct InstructionSet {
    const char* name;
    bool (*supported)();
    const Kernel* kernels;
};

const InstructionSet instruction_sets[] = {
#ifdef QUIRE_WITH_AVX512BF16
    {"avx512bf16", has_avx512bf16, avx512bf16::kernels},
#endif
#ifdef QUIRE_WITH_AVX512
    {"avx512", has_avx512, avx512::kernels},
#endif
#ifdef QUIRE_WITH_AVX2
    {"avx2", has_avx2, avx2::kernels},
#endif
#ifdef QUIRE_WITH_PORTABLE
    {"portable", always, portable::kernels},
#endif
};

const int64_t num_instruction_sets = sizeof(instruction_sets) / sizeof(instruction_sets[0]);

bool in_table(int64_t index) { return index >= 0 && index < num_instruction_sets; }

}  // namespace
}  // namespace quire

int64_t quire_cpu_abi_version() { return QUIRE_CPU_ABI_VERSION; }

const char* quire_cpu_weight_layout() { return QUIRE_CPU_WEIGHT_LAYOUT; }

int64_t quire_cpu_max_threads() {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

int64_t quire_cpu_pin_threads(const int64_t* cpus, int64_t count) {
    int64_t refused = 0;
#if defined(_OPENMP) && defined(__linux__)
#pragma omp parallel reduction(+ : refused)
    {
        const int64_t thread = omp_get_thread_num();
        if (thread > 0 && thread < count) {
            cpu_set_t own;
            CPU_ZERO(&own);
            CPU_SET(cpus[thread], &own);
            refused += sched_setaffinity(0, sizeof own, &own) != 0;
        }
    }
#else
    refused = count - 1;
    (void)cpus;
#endif
    return refused;
}

const char* quire_cpu_isa_name(int64_t index) {
    return quire::in_table(index) ? quire::instruction_sets[index].name : nullptr;
}

int64_t quire_cpu_isa_supported(int64_t index) {
    return quire::in_table(index) && quire::instruction_sets[index].supported();
}

void* quire_cpu_kernel(int64_t isa_index, const char* name) {
    if (!quire::in_table(isa_index)) return nullptr;
    const quire::Kernel* kernel = quire::instruction_sets[isa_index].kernels;
    while (kernel->name && std::strcmp(kernel->name, name) != 0) ++kernel;
    return reinterpret_cast<void*>(kernel->function);
}

int64_t quire_cpu_play(const QuireCpuCall* calls, int64_t count) {
    int64_t played = 0;
    while (played < count && calls[played].function(calls[played].arguments) == 0) ++played;
    return played;
}
