// SPDX-License-Identifier: Apache-2.0
// A part of a head's state [keys, values] that is walked through by itself: 16 * width of its columns, in one piece.

#pragma once

#include "lanes16.h"

namespace quire { namespace QUIRE_ISA { namespace {

template <int64_t width>
inline void copy_tile(Float32* to, int64_t to_stride, const Float32* from, int64_t from_stride, int64_t keys) {
    for (int64_t i = 0; i < keys; ++i)
        for (int64_t w = 0; w < width; ++w) store16(to + i * to_stride + 16 * w, load16(from + i * from_stride + 16 * w));
}

}}}  // namespace quire::QUIRE_ISA
