// SPDX-License-Identifier: Apache-2.0
// What the team asks of the system: threads, processors for them, and waiting, which is spinning first and sleeping then.

#pragma once

#include <atomic>
#include <csignal>
#include <cstdint>
#include <pthread.h>
#include <time.h>

#ifdef __linux__
#include <climits>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire { namespace {

inline int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}

// Tells the core that this thread only waits.
inline void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

// Looks until ready() is true, for no longer than budget() nanoseconds; returns whether it is.
template <class Budget, class Ready>
bool spin(Budget budget, Ready ready) {
    constexpr int kPausesPerLook = 32;  // at the clock
    int64_t began = 0;
    for (;;) {
        for (int i = 0; i < kPausesPerLook; ++i) {
            if (ready()) return true;
            pause_core();
        }
        const int64_t now = nanoseconds();
        if (!began) began = now;
        if (now - began >= budget()) return false;
    }
}

// Threads that sleep until the next call. On a system with futexes no thread holds a lock while it calls or falls asleep, so
// one that is stopped there, by a debugger say, delays no other. With a condition variable, a caller may wait for threads
// that it has called before.
class Sleepers {
public:
    uint32_t calls() const { return calls_.load(); }

#ifdef __linux__
    // Returns after the next call, or for no reason; at once if there was another than the `seen` ones.
    void sleep(uint32_t seen) { syscall(SYS_futex, &calls_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0); }
    void call() {
        calls_.fetch_add(1);
        syscall(SYS_futex, &calls_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }
    void restart() {}
#else
    void sleep(uint32_t seen) {
        pthread_mutex_lock(&mutex_);
        while (calls_.load() == seen) pthread_cond_wait(&condition_, &mutex_);
        pthread_mutex_unlock(&mutex_);
    }
    void call() {
        pthread_mutex_lock(&mutex_);
        calls_.fetch_add(1);
        pthread_cond_broadcast(&condition_);
        pthread_mutex_unlock(&mutex_);
    }
    void restart() {
        pthread_mutex_init(&mutex_, nullptr);
        pthread_cond_init(&condition_, nullptr);
    }

private:
    pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
#endif

private:
    static_assert(std::atomic<uint32_t>::is_always_lock_free, "the system compares it");
    std::atomic<uint32_t> calls_{0};
};

// A place where threads wait for something that others bring about with sequentially consistent stores, and then say so.
class WaitingRoom {
public:
    // Returns when ready() is true; sleeps if that takes longer than budget() nanoseconds.
    template <class Budget, class Ready>
    void wait(Budget budget, Ready ready) {
        if (spin(budget, ready)) return;
        asleep_.fetch_add(1);
        for (;;) {
            const uint32_t seen = sleepers_.calls();
            if (ready()) break;
            sleepers_.sleep(seen);
        }
        asleep_.fetch_sub(1);
    }

    // A thread about to sleep either has been counted by now, or sees the change.
    void wake() {
        if (any_asleep()) sleepers_.call();
    }

    bool any_asleep() const { return asleep_.load() > 0; }

    // In a forked process, in which no thread waits.
    void restart() {
        sleepers_.restart();
        asleep_.store(0);
    }

private:
    std::atomic<int64_t> asleep_{0};
    Sleepers sleepers_;
};

// Starts a thread that no signal reaches, for those are for the process's own threads; false if the system refuses.
inline bool start_thread(pthread_t& id, void* (*run)(void*), int64_t argument) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&id, nullptr, run, reinterpret_cast<void*>(static_cast<intptr_t>(argument)));
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return error == 0;
}

// Keeps a thread on one processor; false if the system refuses.
inline bool keep_on(pthread_t id, int64_t processor) {
#ifdef __linux__
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(processor, &own);
    return pthread_setaffinity_np(id, sizeof own, &own) == 0;
#else
    static_cast<void>(id), static_cast<void>(processor);
    return false;
#endif
}

}}  // namespace quire
