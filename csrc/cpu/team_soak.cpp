// SPDX-License-Identifier: Apache-2.0
// A soak of the team, for `make sanitize`: it is built with ThreadSanitizer, and ends with 1 if anything was computed twice or
// not at all. Leaders that take turns, changes of size, forks, signals, threads that are put aside in a piece, threads that are
// stopped wherever they are, as a debugger would, and a process that ends while others compute.

#define QUIRE_ISA soak
#include "quire_cpu.h"
#include "team.h"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace {

std::atomic<int> signals{0};

void pause_for(long microseconds) {
    const timespec time{0, microseconds * 1000};
    nanosleep(&time, nullptr);
}

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "team soak: %s\n", what);
    std::_Exit(1);
}

// Threads of the team that have run a body, which may be stopped from then on: they let no other signal in.
// A team has no more than its largest size.
constexpr int64_t kMostThreads = 8;
std::atomic<int64_t> num_known{0}, stopped{0};
std::atomic<pthread_t> known[kMostThreads];
std::atomic<bool> is_held{false};  // whether a thread that is stopped stays so
thread_local bool is_leader = false, is_known = false;

void let_stop() {
    if (is_leader || is_known) return;
    is_known = true;
    sigset_t stop;
    sigemptyset(&stop);
    sigaddset(&stop, SIGUSR2);
    pthread_sigmask(SIG_UNBLOCK, &stop, nullptr);
    known[num_known.fetch_add(1)].store(pthread_self());
}

// Holds the thread up, at whatever instruction it is.
void stop_here(int) {
    const int saved = errno;
    ++stopped;
    do pause_for(3000);
    while (is_held);
    errno = saved;
}

void stop_one(int64_t number) {
    const pthread_t thread = known[number].load();
    if (thread) pthread_kill(thread, SIGUSR2);
}

// Two loops, of which the second reads what the first wrote on whatever thread.
void run_loops(int64_t count, int64_t work, unsigned seed) {
    std::vector<int64_t> first(count), second(count);
    quire::soak::share(count, work, [&](int64_t i) {
        let_stop();
        if ((seed + i) % 997 == 0) pause_for(300);
        first[i] += i + seed;
    });
    quire::soak::share(count, work, [&](int64_t i) { second[i] += first[count - 1 - i]; });
    for (int64_t i = 0; i < count; ++i) {
        if (second[i] != count - 1 - i + seed) fail("an index was computed twice, late or not at all");
    }
}

void* lead(void* rounds) {
    is_leader = true;
    unsigned seed = static_cast<unsigned>(reinterpret_cast<uintptr_t>(&seed) >> 4);
    for (int64_t i = 0; i < reinterpret_cast<int64_t>(rounds); ++i) {
        seed = seed * 1664525 + 1013904223;
        if (seed >> 28 == 0) quire_cpu_set_threads(1 + (seed >> 8) % kMostThreads);
        if (seed >> 28 == 1) quire_cpu_shuffle(seed >> 8);
        if (seed >> 28 == 2) pause_for(60);  // some fall asleep
        const auto loop = [&] { run_loops(1 + (seed >> 4) % 700, seed % 3 ? int64_t{1} << 30 : int64_t{1} << 18, seed); };
        if (seed % 2) {
            const quire::Session session;
            for (int j = 0; j < 5; ++j) loop();
        } else loop();
    }
    return nullptr;
}

// Once all sleep, a stopped thread delays no other: otherwise this would wait for ever.
void run_without_one_thread() {
    alarm(60);
    for (int64_t number = 0; number < num_known.load(); ++number) {
        pause_for(5000);  // until they sleep
        const int64_t before = stopped.load();
        is_held = true;
        stop_one(number);
        while (stopped.load() == before) pause_for(100);
        for (unsigned seed = 0; seed < 20; ++seed) run_loops(1 + seed * 30, int64_t{1} << 30, seed);
        is_held = false;
    }
    alarm(0);
    if (!stopped) fail("no thread was stopped");
}

void fork_and_run() {
    const pid_t child = fork();
    if (child == 0) {
        is_leader = true;
        run_loops(300, int64_t{1} << 30, 7);
        std::_Exit(0);
    }
    int status = 1;
    if (waitpid(child, &status, 0) != child || status != 0) fail("a forked process did not compute");
}

}  // namespace

// Arguments: rounds, and how many forks: none under sanitizers, whose own locks a fork may catch another thread holding.
int main(int argc, char** argv) {
    const int64_t rounds = argc > 1 ? std::atol(argv[1]) : 2000, forks = argc > 2 ? std::atol(argv[2]) : 0;
    std::signal(SIGUSR1, [](int) { ++signals; });
    std::signal(SIGUSR2, stop_here);
    quire_cpu_set_threads(4);
    pthread_t leaders[3];
    for (pthread_t& leader : leaders) pthread_create(&leader, nullptr, lead, reinterpret_cast<void*>(rounds));
    for (int64_t i = 0; i < forks; ++i) fork_and_run();
    for (int i = 0; i < 100; ++i) {
        kill(getpid(), SIGUSR1);
        stop_one(i % kMostThreads);
        pause_for(500);
    }
    for (pthread_t leader : leaders) pthread_join(leader, nullptr);
    if (!signals) fail("no signal came");
    quire_cpu_set_threads(kMostThreads);
    is_leader = true;
    run_without_one_thread();
    std::puts("team soak: ok");
    std::fflush(stdout);
    pthread_t last;
    pthread_create(&last, nullptr, lead, reinterpret_cast<void*>(int64_t{1} << 40));
    pthread_detach(last);
    pause_for(5000);
    std::exit(0);  // while it computes
}
