// The plain C ABI of the CPU kernel library: everything quire/kernels/cpu/library.py relies on.
//
// Sizes and strides are int64_t and count elements. Kernels are found by (instruction set, name), so that the library
// and its Python side cannot disagree about an order; a change of any signature raises QUIRE_CPU_ABI_VERSION, and packing a
// matrix into other bytes changes QUIRE_CPU_WEIGHT_LAYOUT.

#pragma once

#include <cstdint>

#define QUIRE_CPU_ABI_VERSION 7
#define QUIRE_CPU_WEIGHT_LAYOUT "panels-4"
#define QUIRE_CPU_EXPORT extern "C" __attribute__((visibility("default")))

namespace quire {

// Element types, by the codes that callers pass.
enum DType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3 };

// What a kernel returns when an address is not aligned as the caller said.
constexpr int64_t kMisaligned = -3;

// A row of an instruction set's function table; a null name ends the table. The argument points to what all addresses are
// a multiple of, an int64_t, and the kernel's arguments one after the other, eight bytes each: addresses and int64_t as
// they are, floats as doubles.
struct Kernel {
    const char* name;
    int64_t (*function)(const char* arguments);
};

}  // namespace quire

QUIRE_CPU_EXPORT int64_t quire_cpu_abi_version();

// Name of the form into which weights are packed.
QUIRE_CPU_EXPORT const char* quire_cpu_weight_layout();

// Threads that a parallel kernel called from this thread would use.
QUIRE_CPU_EXPORT int64_t quire_cpu_max_threads();

// Keeps thread i of the calling thread's team on processor cpus[i], for 0 < i < count; the caller itself, whose children
// would inherit it, stays free. Returns how many threads the system refused to pin.
QUIRE_CPU_EXPORT int64_t quire_cpu_pin_threads(const int64_t* cpus, int64_t count);

// Name of the i-th instruction set in the library, best first; null past the last.
QUIRE_CPU_EXPORT const char* quire_cpu_isa_name(int64_t index);

// Whether this processor runs the i-th instruction set.
QUIRE_CPU_EXPORT int64_t quire_cpu_isa_supported(int64_t index);

// The kernel of that name for the i-th instruction set; null if there is none.
QUIRE_CPU_EXPORT void* quire_cpu_kernel(int64_t isa_index, const char* name);

// One recorded call: a kernel and its packed arguments.
struct QuireCpuCall {
    int64_t (*function)(const char* arguments);
    const char* arguments;
};

// Runs calls in order; returns how many came before the first that returned anything but 0, or `count`.
QUIRE_CPU_EXPORT int64_t quire_cpu_play(const QuireCpuCall* calls, int64_t count);
