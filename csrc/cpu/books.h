// SPDX-License-Identifier: Apache-2.0
// What codes of 4 bits stand for that are no integers themselves.

#pragma once

#include "panels.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Sixteen numbers, and the same in steps of `unit`, rounded where they are no multiples of it: what is multiplied in the fast
// mode.
struct Book {
    Float32 values[16];
    int8_t integers[16];
    float unit;
};

constexpr Book kBooks[] = {
    // E2M1 (OCP microscaling formats, 2023).
    {{{0.0f}, {0.5f}, {1.0f}, {1.5f}, {2.0f}, {3.0f}, {4.0f}, {6.0f},
      {-0.0f}, {-0.5f}, {-1.0f}, {-1.5f}, {-2.0f}, {-3.0f}, {-4.0f}, {-6.0f}},
     {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}, 0.5f},
    // The table of GGUF's IQ4_NL.
    {{{-127.0f}, {-104.0f}, {-83.0f}, {-65.0f}, {-49.0f}, {-35.0f}, {-22.0f}, {-10.0f},
      {1.0f}, {13.0f}, {25.0f}, {38.0f}, {53.0f}, {69.0f}, {89.0f}, {113.0f}},
     {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}, 1.0f},
    // NormalFloat (T. Dettmers et al., 2023, arXiv:2305.14314).
    {{{-1.0f}, {-0.6961928009986877f}, {-0.5250730514526367f}, {-0.39491748809814453f},
      {-0.28444138169288635f}, {-0.18477343022823334f}, {-0.09105003625154495f}, {0.0f},
      {0.07958029955625534f}, {0.16093020141124725f}, {0.24611230194568634f}, {0.33791524171829224f},
      {0.44070982933044434f}, {0.5626170039176941f}, {0.7229568362236023f}, {1.0f}},
     {-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127}, 1.0f / 127},
    // bitsandbytes' own float.
    {{{0.0f}, {1.0f / 192}, {2.0f / 3}, {1.0f}, {1.0f / 3}, {0.5f}, {1.0f / 6}, {0.25f},
      {-0.0f}, {-1.0f / 192}, {-2.0f / 3}, {-1.0f}, {-1.0f / 3}, {-0.5f}, {-1.0f / 6}, {-0.25f}},
     {0, 1, 85, 127, 42, 64, 21, 32, 0, -1, -85, -127, -42, -64, -21, -32}, 1.0f / 127},
};

inline const Book& book_of(int64_t format) { return kBooks[format - kE2M1]; }

// The integers, counted from kBookZero, as bytes: what a dot product multiplies.
struct BookBytes {
    alignas(16) uint8_t at[16];

    explicit BookBytes(int64_t format) {
        for (int i = 0; i < 16; ++i) at[i] = static_cast<uint8_t>(book_of(format).integers[i] + kBookZero);
    }
};

}}}  // namespace quire::QUIRE_ISA
