// SPDX-License-Identifier: Apache-2.0
// The dot products of this instruction set: Int8Dot and Int4Dot, as dot_steps.h describes them.

#pragma once

#include "vec.h"

#if defined(__AVX512VNNI__)
#include "dot_avx512.h"
#elif defined(__AVXVNNI__)
#include "dot_avxvnni.h"
#elif defined(__AVX2__)
#include "dot_avx2.h"
#elif defined(QUIRE_NEON)
#include "dot_neon.h"
#else
#include "dot_portable.h"
#endif
