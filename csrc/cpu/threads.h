// What the team asks of the system: threads, processors for them, and waiting, which is spinning first and sleeping then.

#pragma once

#include <atomic>
#include <csignal>
#include <cstdint>
#include <pthread.h>
#include <time.h>

#ifdef __linux__
#include <sched.h>
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

// A place where threads wait for something that others bring about with sequentially consistent stores, and then say so.
class WaitingRoom {
public:
    // Returns when ready() is true; sleeps if that takes longer than budget() nanoseconds.
    template <class Budget, class Ready>
    void wait(Budget budget, Ready ready) {
        if (spin(budget, ready)) return;
        pthread_mutex_lock(&mutex_);
        asleep_.fetch_add(1);
        while (!ready()) pthread_cond_wait(&condition_, &mutex_);
        asleep_.fetch_sub(1);
        pthread_mutex_unlock(&mutex_);
    }

    // Whoever is about to sleep has either been counted by now, or sees what has come about.
    void wake() {
        if (!any_asleep()) return;
        pthread_mutex_lock(&mutex_);
        pthread_cond_broadcast(&condition_);
        pthread_mutex_unlock(&mutex_);
    }

    bool any_asleep() const { return asleep_.load() > 0; }

    // In a forked process, where nobody waits.
    void restart() {
        pthread_mutex_init(&mutex_, nullptr);
        pthread_cond_init(&condition_, nullptr);
        asleep_.store(0);
    }

private:
    std::atomic<int64_t> asleep_{0};
    pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
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
