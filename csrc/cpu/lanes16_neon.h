// SPDX-License-Identifier: Apache-2.0
// Sixteen lanes in four registers of an Arm processor: the compiler keeps vectors that are wider than a register in memory.

#pragma once

#include "vec.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int kRegisters16 = 4;

struct Lanes16 { float32x4_t at[4]; };
struct Ints16 { int32x4_t at[4]; };

template <class Quarter>
inline Lanes16 floats_of(Quarter quarter) { return {{quarter(0), quarter(1), quarter(2), quarter(3)}}; }
template <class Quarter>
inline Ints16 ints_of(Quarter quarter) { return {{quarter(0), quarter(1), quarter(2), quarter(3)}}; }

inline Lanes16 splat16(float x) { return floats_of([&](int) { return vdupq_n_f32(x); }); }
inline Ints16 splat16(int32_t x) { return ints_of([&](int) { return vdupq_n_s32(x); }); }
inline Lanes16 fma(Lanes16 a, Lanes16 b, Lanes16 c) {
    return floats_of([&](int i) { return vfmaq_f32(c.at[i], a.at[i], b.at[i]); });
}
inline Lanes16 operator*(Lanes16 a, Lanes16 b) { return floats_of([&](int i) { return vmulq_f32(a.at[i], b.at[i]); }); }
inline Lanes16 operator+(Lanes16 a, Lanes16 b) { return floats_of([&](int i) { return vaddq_f32(a.at[i], b.at[i]); }); }
inline Lanes16 operator-(Lanes16 a, Lanes16 b) { return floats_of([&](int i) { return vsubq_f32(a.at[i], b.at[i]); }); }
inline Ints16 operator*(Ints16 a, Ints16 b) { return ints_of([&](int i) { return vmulq_s32(a.at[i], b.at[i]); }); }
inline Ints16 operator-(Ints16 a, Ints16 b) { return ints_of([&](int i) { return vsubq_s32(a.at[i], b.at[i]); }); }
inline Lanes16 to_floats(Ints16 v) { return floats_of([&](int i) { return vcvtq_f32_s32(v.at[i]); }); }

// What a function of two vectors makes of them.
template <class Function>
inline Lanes16 by_vectors(Function function, Lanes16 a, Lanes16 b) {
    const Vec low = function(joined(a.at[0], a.at[1]), joined(b.at[0], b.at[1]));
    const Vec high = function(joined(a.at[2], a.at[3]), joined(b.at[2], b.at[3]));
    return {{low_half(low), high_half(low), low_half(high), high_half(high)}};
}

inline Ints16 load_words(const void* p) {
    return ints_of([&](int i) { return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(p) + 16 * i)); });
}
inline Ints16 bits_of(Ints16 v, int64_t shift, int32_t mask) {
    const int32x4_t right = vdupq_n_s32(-static_cast<int32_t>(shift));
    return ints_of([&](int i) { return vandq_s32(vshlq_s32(v.at[i], right), vdupq_n_s32(mask)); });
}

// The bfloat16 in each word's high, or low, half.
inline Lanes16 high_halves(Ints16 v) {
    const int32x4_t mask = vdupq_n_s32(static_cast<int32_t>(0xffff0000));
    return floats_of([&](int i) { return vreinterpretq_f32_s32(vandq_s32(v.at[i], mask)); });
}
inline Lanes16 low_halves(Ints16 v) {
    return floats_of([&](int i) { return vreinterpretq_f32_s32(vshlq_n_s32(v.at[i], 16)); });
}

inline Lanes16 load16(const Float32* p) {
    return floats_of([&](int i) { return vld1q_f32(&p->value + 4 * i); });
}
inline void store16(Float32* p, Lanes16 v) {
    for (int i = 0; i < 4; ++i) vst1q_f32(&p->value + 4 * i, v.at[i]);
}
inline Lanes16 load16(const Float16* p) {
    return floats_of([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits + 4 * i))); });
}
inline Lanes16 load16(const BFloat16* p) {
    return floats_of([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits + 4 * i), 16)); });
}
inline Lanes16 load16(const Int8* p) {
    const int8x16_t bytes = vld1q_s8(&p->value);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return to_floats({{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}});
}
inline Ints16 load16(const uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    const int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes)));
    const int16x8_t high = vreinterpretq_s16_u16(vmovl_high_u8(bytes));
    return {{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}};
}

}}}  // namespace quire::QUIRE_ISA
