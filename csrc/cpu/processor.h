// SPDX-License-Identifier: Apache-2.0
// The instruction sets of this processor: what it, or its system, lacks of each. Included by the library and, while it is
// being configured, by the program that names the sets to compile (processor.cpp).

#pragma once

#ifdef __x86_64__
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

namespace quire {
namespace {

// Each says what this processor, or its system, lacks; null if nothing.
const char* nothing_missing() { return nullptr; }

#if defined(__x86_64__)

// Whether a bit of a register (0 = eax ... 3 = edx) is set in leaf 7.
bool has(unsigned subleaf, int which, int bit) {
    unsigned registers[4] = {};
    __get_cpuid_count(7, subleaf, &registers[0], &registers[1], &registers[2], &registers[3]);
    return registers[which] >> bit & 1;
}

const char* missing_avx2() {
    __builtin_cpu_init();
    const bool all = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return all ? nullptr : "the processor lacks AVX2, FMA or F16C";
}

const char* missing_avxvnni() {
    if (const char* missing = missing_avx2()) return missing;
    return has(1, 0, 4) ? nullptr : "the processor lacks AVX-VNNI";
}

const char* missing_avx512() {
    if (const char* missing = missing_avx2()) return missing;
    const bool all = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                     __builtin_cpu_supports("avx512vnni");
    return all ? nullptr : "the processor lacks AVX-512 (F, BW, DQ, VL) or its VNNI";
}

const char* missing_avx512bf16() {
    if (const char* missing = missing_avx512()) return missing;
    return has(1, 0, 5) ? nullptr : "the processor lacks AVX512-BF16";
}

const char* missing_amx() {
    if (const char* missing = missing_avx512bf16()) return missing;
    if (!has(0, 3, 24) || !has(0, 3, 25) || !has(0, 3, 22)) return "the processor lacks AMX (tiles, INT8, BF16)";
#ifdef __linux__
    // A process asks for the registers of tiles, because a thread's state grows by 8 KiB with them.
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return nullptr;
#endif
    return "the system does not let this process use AMX";
}

#elif defined(__aarch64__)

enum Feature { kDotProduct, kInt8Matrix };

bool has(Feature feature) {
#if defined(__linux__)
    return feature == kDotProduct ? getauxval(AT_HWCAP) >> 20 & 1 : getauxval(AT_HWCAP2) >> 13 & 1;
#elif defined(__APPLE__)
    int value = 0;
    size_t size = sizeof value;
    const char* name = feature == kDotProduct ? "hw.optional.arm.FEAT_DotProd" : "hw.optional.arm.FEAT_I8MM";
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
#else
    return false;
#endif
}

const char* missing_dotprod() { return has(kDotProduct) ? nullptr : "the processor lacks DotProd"; }

const char* missing_i8mm() {
    if (const char* missing = missing_dotprod()) return missing;
    return has(kInt8Matrix) ? nullptr : "the processor lacks I8MM";
}

#endif

struct InstructionSet {
    const char* name;
    const char* (*missing)();
};

// Best first.
const InstructionSet instruction_sets[] = {
#if defined(__x86_64__)
    {"amx", missing_amx},
    {"avx512bf16", missing_avx512bf16},
    {"avx512", missing_avx512},
    {"avxvnni", missing_avxvnni},
    {"avx2", missing_avx2},
#elif defined(__aarch64__)
    {"i8mm", missing_i8mm},
    {"dotprod", missing_dotprod},
    {"neon", nothing_missing},
#endif
    {"portable", nothing_missing},
};

}  // namespace
}  // namespace quire
