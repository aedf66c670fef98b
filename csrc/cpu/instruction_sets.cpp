// SPDX-License-Identifier: Apache-2.0
// The instruction sets that kernels are written for: what was compiled, and what this processor lacks of each. Compiled
// without raised instruction-set flags, like all shared code.

#include <cstring>

#include "processor.h"
#include "quire_built.h"  // QUIRE_BUILT: made by CMake, a row for each set that was compiled
#include "quire_cpu.h"

// Whether a process stands in for instructions of a set that its processor lacks; tests/kernels/emulator.cpp defines it.
extern "C" __attribute__((weak, visibility("default"))) int64_t quire_cpu_emulates(const char* isa);

namespace quire {

#define QUIRE_DECLARE(isa, base) namespace isa { extern const Kernel kernels[]; }
QUIRE_BUILT(QUIRE_DECLARE)

namespace {

constexpr int64_t num_instruction_sets = sizeof instruction_sets / sizeof instruction_sets[0];

// A set that was compiled: its own kernels, and those of the set that it shares all others with.
struct Built {
    const char* name;
    const Kernel* tables[2];
};

#define QUIRE_ROW(isa, base) {#isa, {isa::kernels, base::kernels}},
const Built built[] = {QUIRE_BUILT(QUIRE_ROW)};

const Built* built_of(int64_t index) {
    if (index < 0 || index >= num_instruction_sets) return nullptr;
    for (const Built& candidate : built) {
        if (std::strcmp(candidate.name, instruction_sets[index].name) == 0) return &candidate;
    }
    return nullptr;
}

// The row of a kernel; null if there is none.
const Kernel* row_of(int64_t index, const char* name) {
    const Built* own = built_of(index);
    if (!own) return nullptr;
    for (const Kernel* table : own->tables) {
        for (const Kernel* kernel = table; kernel->name; ++kernel) {
            if (std::strcmp(kernel->name, name) == 0) return kernel;
        }
    }
    return nullptr;
}

}  // namespace
}  // namespace quire

const char* quire_cpu_isa_name(int64_t index) {
    return index >= 0 && index < quire::num_instruction_sets ? quire::instruction_sets[index].name : nullptr;
}

const char* quire_cpu_isa_missing(int64_t index) {
    if (!quire::built_of(index)) return "this build has no kernels for it";
    const quire::InstructionSet& isa = quire::instruction_sets[index];
    if (quire_cpu_emulates && quire_cpu_emulates(isa.name)) return nullptr;
    return isa.missing();
}

void* quire_cpu_kernel(int64_t isa_index, const char* name) {
    const quire::Kernel* kernel = quire::row_of(isa_index, name);
    return kernel ? reinterpret_cast<void*>(kernel->function) : nullptr;
}

const char* quire_cpu_signature(int64_t isa_index, const char* name) {
    const quire::Kernel* kernel = quire::row_of(isa_index, name);
    return kernel ? kernel->signature : nullptr;
}
