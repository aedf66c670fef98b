// SPDX-License-Identifier: Apache-2.0
// The threads of all kernels: a kernel is a plain function that one thread runs, and shares loops that are long enough with
// the others.
//
// Every index writes results of its own, so neither the number of threads nor their pieces change a bit.

#pragma once

#include <cstdint>

namespace quire {

// Calls body(context, begin, end) for ranges that make up [0, count), on this thread and others; returns when all is done.
// What was written before is seen by the bodies, and what they wrote after. `work` is about how many multiply-adds it all
// takes: it decides whether other threads are worth it. In a body, the same runs on the thread that asks.
void run_shared(int64_t count, int64_t work, void (*body)(const void*, int64_t, int64_t), const void* context);

// A run of kernels with little between them: while it lives, threads that wait do not sleep. One thread has one at a time, and
// with it the team; others wait.
class Session {
public:
    Session();
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

private:
    bool begins_;
};

// How many threads there may be: for choosing units, never results.
int64_t team_threads();

namespace QUIRE_ISA { namespace {

// What an element of a loop takes that is not made of multiply-adds: loads, stores, conversions, a norm, an activation.
constexpr int64_t kElementWork = 8;

// Calls body(begin, end) for ranges that make up [0, count), each on some thread.
template <class Body>
inline void share_ranges(int64_t count, int64_t work, const Body& body) {
    run_shared(count, work, [](const void* at, int64_t begin, int64_t end) { (*static_cast<const Body*>(at))(begin, end); },
               &body);
}

// Calls body(index) for each index below `count`, on some thread.
template <class Body>
inline void share(int64_t count, int64_t work, const Body& body) {
    share_ranges(count, work, [&](int64_t begin, int64_t end) {
        for (int64_t index = begin; index < end; ++index) body(index);
    });
}

// How many rows all threads together refused.
class Refusals {
public:
    void add() { __atomic_fetch_add(&count_, 1, __ATOMIC_RELAXED); }
    int64_t count() const { return __atomic_load_n(&count_, __ATOMIC_RELAXED); }

private:
    int64_t count_ = 0;
};

}}  // namespace QUIRE_ISA
}  // namespace quire
