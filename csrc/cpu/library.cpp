// SPDX-License-Identifier: Apache-2.0
// What the library says of itself, its threads, and running many kernels at a time. Compiled without raised instruction-set
// flags, like all shared code.

#include "float_mode.h"
#include "quire_cpu.h"
#include "team.h"
#include "threads.h"

int64_t quire_cpu_abi_version() { return QUIRE_CPU_ABI_VERSION; }

const char* quire_cpu_weight_layout() { return QUIRE_CPU_WEIGHT_LAYOUT; }

int64_t quire_cpu_take_float_mode() {
    const int64_t before = quire::float_mode();
    quire::set_float_mode(quire::kFloatMode);
    return before;
}

void quire_cpu_set_float_mode(int64_t mode) { quire::set_float_mode(mode); }

int64_t quire_cpu_play(const QuireCpuCall* calls, int64_t count) {
    const quire::Session session;
    int64_t replayed = 0;
    while (replayed < count && calls[replayed].function(calls[replayed].arguments) == 0) ++replayed;
    return replayed;
}

int64_t quire_cpu_play_timed(const QuireCpuCall* calls, int64_t count, int64_t* nanoseconds) {
    const quire::Session session;
    int64_t replayed = 0, began = quire::nanoseconds();
    while (replayed < count && calls[replayed].function(calls[replayed].arguments) == 0) {
        const int64_t now = quire::nanoseconds();
        nanoseconds[replayed++] = now - began;
        began = now;
    }
    return replayed;
}
