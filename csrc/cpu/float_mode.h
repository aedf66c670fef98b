// SPDX-License-Identifier: Apache-2.0
// How a thread's processor computes with floats: rounding to nearest, and numbers below the normal ones counted as any others.
//
// That is a mode of each thread, inherited by the threads that it starts. Any library may have changed it, for a thread or
// for all of a program, and then bits would depend on the thread that computed them. So kernels set it, on every thread.

#pragma once

#include <cstdint>

namespace quire { namespace {

#if defined(__x86_64__)
constexpr int64_t kFloatMode = 0x1f80, kModeBits = 0xffc0;  // of MXCSR, whose other bits only say what has happened
inline int64_t float_mode() { return __builtin_ia32_stmxcsr() & kModeBits; }
inline void set_float_mode(int64_t mode) { __builtin_ia32_ldmxcsr(static_cast<uint32_t>(mode)); }
#elif defined(__aarch64__)
constexpr int64_t kFloatMode = 0;
inline int64_t float_mode() {
    int64_t mode;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
inline void set_float_mode(int64_t mode) { __asm__ __volatile__("msr fpcr, %0" : : "r"(mode)); }
#else
constexpr int64_t kFloatMode = 0;
inline int64_t float_mode() { return kFloatMode; }
inline void set_float_mode(int64_t) {}
#endif

// While it lives, this thread computes so.
class FloatMode {
public:
    FloatMode() : before_(float_mode()) {
        if (before_ != kFloatMode) set_float_mode(kFloatMode);
    }
    ~FloatMode() {
        if (before_ != kFloatMode) set_float_mode(before_);
    }
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

private:
    const int64_t before_;
};

}}  // namespace quire
