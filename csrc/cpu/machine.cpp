// SPDX-License-Identifier: Apache-2.0
// What this machine can do at most: the limits that `quire bench kernels` compares with.

#include "kernels.h"
#include "lanes16.h"

namespace quire { namespace QUIRE_ISA {

namespace { constexpr int64_t kWholeMachine = int64_t{1} << 40; }  // work for which all threads are wanted

// Twelve independent chains of multiply-adds on every thread, in the widest registers; returns the floating-point operations
// done.
int64_t peak_fma(void* out, int64_t iterations) {
    constexpr int kChains = 12 / kRegisters16;
    // Were two registers of a chain to start alike, the compiler would compute one of them for both.
    Float32 starts[kChains * 16];
    for (int i = 0; i < kChains * 16; ++i) starts[i].value = static_cast<float>(i);
    const int64_t threads = team_threads();
    uint32_t seen = 0;  // so that no thread's chains can be left out
    share(threads, kWholeMachine, [&](int64_t) {
        Lanes16 chains[kChains];
        for (int c = 0; c < kChains; ++c) chains[c] = load16(starts + c * 16);
        const Lanes16 factor = splat16(0.999f), term = splat16(1e-3f);
        for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
            for (int c = 0; c < kChains; ++c) chains[c] = fma(chains[c], factor, term);
        }
        uint32_t own = 0;
        for (int c = 0; c < kChains; ++c) {
            uint32_t lanes[16];
            store16(reinterpret_cast<Float32*>(lanes), chains[c]);
            for (const uint32_t lane : lanes) own ^= lane;
        }
        __atomic_fetch_xor(&seen, own, __ATOMIC_RELAXED);
    });
    *static_cast<uint32_t*>(out) = seen;
    return threads * iterations * kChains * 16 * 2;
}

// Reads a buffer of a multiple of 256 bytes once, a contiguous share per thread; returns the bytes read.
int64_t read_memory(void* out, const void* data, int64_t bytes) {
    constexpr int64_t kBlock = 1 << 16;
    const char* start = static_cast<const char*>(data);
    const int64_t lines = bytes / 256, per_block = kBlock / 256;
    uint32_t total = 0;
    share_ranges((lines + per_block - 1) / per_block, kWholeMachine, [&](int64_t begin, int64_t end) {
        Bits sums[8] = {};
        for (int64_t line = begin * per_block; line < end * per_block && line < lines; ++line) {
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) {
                Bits words;
                __builtin_memcpy(&words, start + (line * 8 + j) * 32, sizeof words);
                sums[j] ^= words;
            }
        }
        uint32_t own = 0;
        for (int j = 0; j < 8; ++j) own ^= sums[j][0] ^ sums[j][7];
        __atomic_fetch_xor(&total, own, __ATOMIC_RELAXED);
    });
    *static_cast<uint32_t*>(out) = total;
    return lines * 256;
}

}}  // namespace quire::QUIRE_ISA
