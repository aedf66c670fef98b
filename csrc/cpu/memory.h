// SPDX-License-Identifier: Apache-2.0
// What kernels ask of the system for the memory that they read.

#pragma once

#include <cstdint>

namespace quire {

// Large memory that is read through, or in pieces all over, is read faster through pages of 2 MiB than of 4 KiB. Wherever
// there are none, nothing is lost. Smaller memory is left alone: it holds no such page, and advice for each piece would cut the
// process's memory into too many areas.
void prefer_huge_pages(void* data, int64_t bytes);

// Whether kernels that read memory from end to end ask for what they will need next. Zen 4 sees by itself what that is, and has
// it sooner if it is left alone: what it is asked for only takes the places of its own requests. (Bits are the same.)
bool streams_are_fetched_ahead();

}  // namespace quire
