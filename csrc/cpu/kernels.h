// SPDX-License-Identifier: Apache-2.0
// What every kernel source shares: its export rule, dispatch over element types, and the team of threads.

#pragma once

#include "quire_cpu.h"
#include "team.h"
#include "vec.h"

namespace quire { namespace QUIRE_ISA { namespace {

// Calls body(T{}) with the element type of a code; returns its status, or -1 for an unknown code.
template <class Body>
inline int64_t with_dtype(int64_t dtype, Body body) {
    switch (dtype) {
        case kFloat32: return body(Float32{});
        case kBFloat16: return body(BFloat16{});
        case kFloat16: return body(Float16{});
        default: return -1;
    }
}

}}}  // namespace quire::QUIRE_ISA
