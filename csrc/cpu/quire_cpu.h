// SPDX-License-Identifier: Apache-2.0
// The plain C ABI of the CPU kernel library: everything quire/kernels/cpu/library.py relies on.
//
// Sizes and strides are int64_t and count elements. Kernels are found by (instruction set, name), so that the library
// and its Python side cannot disagree about an order, and each says its signature, which its Python side compares with what it
// means to pass. Arguments that keep their types and change their meaning raise QUIRE_CPU_ABI_VERSION; packing a matrix into
// other bytes changes QUIRE_CPU_WEIGHT_LAYOUT.

#pragma once

#include <cstdint>

#define QUIRE_CPU_ABI_VERSION 15
#define QUIRE_CPU_WEIGHT_LAYOUT "panels-8"
#define QUIRE_CPU_EXPORT extern "C" __attribute__((visibility("default")))

namespace quire {

// Element types, by the codes that callers pass.
enum DType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3 };

// What a kernel returns when the system refuses it memory, and when an address is not aligned as the caller said.
constexpr int64_t kNoMemory = -2, kMisaligned = -3;

// A row of an instruction set's function table; a null name ends the table. The argument points to what all addresses are
// a multiple of, an int64_t, and the kernel's arguments one after the other, eight bytes each: addresses and int64_t as
// they are, floats as doubles. The signature has a letter for each argument: P for an address, q for an int64_t, d for a float.
struct Kernel {
    const char* name;
    int64_t (*function)(const char* arguments);
    const char* signature;
};

}  // namespace quire

QUIRE_CPU_EXPORT int64_t quire_cpu_abi_version();

// Name of the form into which weights are packed.
QUIRE_CPU_EXPORT const char* quire_cpu_weight_layout();

// Sets the number of threads of kernels, for all callers: the process has one team. Returns the number that it will have.
QUIRE_CPU_EXPORT int64_t quire_cpu_set_threads(int64_t count);

// Pins thread i of the team to processor cpus[i], for 0 < i < count. Thread 0 is the caller of a kernel and stays unpinned,
// since its children would inherit that. Returns the number of threads that the system refused to start or to pin.
QUIRE_CPU_EXPORT int64_t quire_cpu_pin_threads(const int64_t* cpus, int64_t count);

// Calls body(context, begin, end) for ranges that make up [0, count), on threads of the team where `work`, in
// multiply-adds, is worth it.
QUIRE_CPU_EXPORT void quire_cpu_share(int64_t count, int64_t work, void (*body)(const void*, int64_t, int64_t),
                                      const void* context);

// Asks for pages of 2 MiB under large memory that is read often; does nothing where there are none.
QUIRE_CPU_EXPORT void quire_cpu_prefer_huge_pages(void* data, int64_t bytes);

// For tests: from now on all loops are shared, however short, and taken in another order; 0 is as usual.
QUIRE_CPU_EXPORT void quire_cpu_shuffle(int64_t seed);

// Name of the i-th instruction set in the library, best first; null past the last.
QUIRE_CPU_EXPORT const char* quire_cpu_isa_name(int64_t index);

// What keeps this processor, its system or this build from the i-th instruction set; null if nothing does.
QUIRE_CPU_EXPORT const char* quire_cpu_isa_missing(int64_t index);

// The kernel of that name for the i-th instruction set; null if there is none.
QUIRE_CPU_EXPORT void* quire_cpu_kernel(int64_t isa_index, const char* name);

// The signature of that kernel; null if there is none.
QUIRE_CPU_EXPORT const char* quire_cpu_signature(int64_t isa_index, const char* name);

// From now on the calling thread computes with floats as kernels do; returns in which mode it was, to be set again.
QUIRE_CPU_EXPORT int64_t quire_cpu_take_float_mode();
QUIRE_CPU_EXPORT void quire_cpu_set_float_mode(int64_t mode);

// One recorded call: a kernel and its packed arguments.
struct QuireCpuCall {
    int64_t (*function)(const char* arguments);
    const char* arguments;
};

// Runs calls in order; returns how many came before the first that returned anything but 0, or `count`.
QUIRE_CPU_EXPORT int64_t quire_cpu_play(const QuireCpuCall* calls, int64_t count);

// The same, and how many nanoseconds each took.
QUIRE_CPU_EXPORT int64_t quire_cpu_play_timed(const QuireCpuCall* calls, int64_t count, int64_t* nanoseconds);
