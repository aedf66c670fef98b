// A soak of the team, for `make sanitize`: it is built with ThreadSanitizer, and ends with 1 if anything was computed twice or
// not at all. Leaders that take turns, changes of size, forks, signals, and threads that are put aside in a piece.

#define QUIRE_ISA soak
#include "quire_cpu.h"
#include "team.h"

#include <atomic>
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

// Two loops, of which the second reads what the first wrote on whatever thread.
void run_loops(int64_t count, int64_t work, unsigned seed) {
    std::vector<int64_t> first(count), second(count);
    quire::soak::share(count, work, [&](int64_t i) {
        if ((seed + i) % 997 == 0) pause_for(300);
        first[i] += i + seed;
    });
    quire::soak::share(count, work, [&](int64_t i) { second[i] += first[count - 1 - i]; });
    for (int64_t i = 0; i < count; ++i) {
        if (second[i] != count - 1 - i + seed) fail("an index was computed twice, late or not at all");
    }
}

void* lead(void* rounds) {
    unsigned seed = static_cast<unsigned>(reinterpret_cast<uintptr_t>(&seed) >> 4);
    for (int64_t i = 0; i < reinterpret_cast<int64_t>(rounds); ++i) {
        seed = seed * 1664525 + 1013904223;
        if (seed >> 28 == 0) quire_cpu_set_threads(1 + (seed >> 8) % 8);
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

void fork_and_run() {
    const pid_t child = fork();
    if (child == 0) {
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
    quire_cpu_set_threads(4);
    pthread_t leaders[3];
    for (pthread_t& leader : leaders) pthread_create(&leader, nullptr, lead, reinterpret_cast<void*>(rounds));
    for (int64_t i = 0; i < forks; ++i) fork_and_run();
    for (int i = 0; i < 100; ++i) {
        kill(getpid(), SIGUSR1);
        pause_for(500);
    }
    for (pthread_t leader : leaders) pthread_join(leader, nullptr);
    if (!signals) fail("no signal came");
    std::puts("team soak: ok");
}
