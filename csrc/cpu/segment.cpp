// SPDX-License-Identifier: Apache-2.0
// Exchanging pieces through memory that processes share. Compiled without raised instruction-set flags, like all shared code.
//
// A rank numbers its pieces. Piece n lies in its slot n % 2, and stays until the rank has seen piece n + 1 of every rank, which
// no rank publishes before it is done with all pieces n. So one number per rank is all that has to be published.
//
// A waiting rank spins for a bounded time and then sleeps on the number that it waits for (a futex), waking up now and then
// to poll whether the other process still exists. The timeout is counted in such polls, so that a suspended machine makes no
// rank give up its peers.

#include "segment.h"

#include "threads.h"

#include <cstdio>
#include <cstring>

#ifdef __linux__
#include <climits>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {

namespace {

struct Rank {
    alignas(64) std::atomic<uint32_t> shown;   // the number of its last piece
    alignas(64) std::atomic<uint32_t> asleep;  // how many sleep until there is another
    int32_t pid;
    int32_t lost;  // 1 + the rank that it waited for in vain; 0: none
    std::atomic<uint32_t> has_left;
    char reason[112];  // why; for people
};

constexpr int64_t kSlots = 4096;  // where those of rank 0 begin

}  // namespace

struct Segment {
    int64_t ranks, most_bytes;
    int64_t patience;  // looks at a rank that does not answer, though its process runs
    int64_t tag;       // distinguishes segments
    Rank rank[kMostRanks];
};

namespace {

static_assert(sizeof(Rank) == 192 && sizeof(Segment) == 64 + kMostRanks * sizeof(Rank) && sizeof(Segment) <= kSlots);
static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share it");

constexpr int64_t kSpin = 100 * 1000, kLook = 100 * 1000 * 1000;  // nanoseconds; of the latter, between two looks
constexpr int64_t kLooksAtStopped = 50;                           // in turn, before it is given up

// Numbers start anew after the last one.
bool has_shown(const Rank& rank, uint32_t number) { return static_cast<int32_t>(rank.shown.load() - number) >= 0; }

// What keeps a process from answering: Z or X (it has ended), T (it is stopped); 0 if nothing.
char trouble_of(int32_t pid) {
    char path[32], text[512];
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    std::FILE* const file = std::fopen(path, "r");
    if (!file) return 'X';
    const size_t bytes = std::fread(text, 1, sizeof text - 1, file);
    std::fclose(file);
    text[bytes] = 0;
    const char* const name_end = std::strrchr(text, ')');  // the name may hold anything
    const char state = name_end && name_end[1] ? name_end[2] : 'X';
    return std::strchr("ZXT", state) ? state : 0;
}

// Sleeps until a word changes from `seen`, another process wakes its sleepers, or it is time to poll.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
    const timespec time{0, kLook};
#ifdef __linux__
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
#else
    static_cast<void>(word), static_cast<void>(seen), nanosleep(&time, nullptr);
#endif
}

void wake_sleepers(std::atomic<uint32_t>& word) {
#ifdef __linux__
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
    static_cast<void>(word);
#endif
}

// Whether a rank that others wait for is gone. To be asked once per look.
class Watch {
public:
    Watch(const Rank& rank, int64_t patience) : rank_(rank), patience_(patience) {}

    bool gives_up() {
        const char trouble = rank_.has_left.load() ? 'X' : trouble_of(rank_.pid);
        stopped_ = trouble == 'T' ? stopped_ + 1 : 0;
        return (trouble && trouble != 'T') || stopped_ >= kLooksAtStopped || ++looks_ >= patience_;
    }

private:
    const Rank& rank_;
    const int64_t patience_;
    int64_t looks_ = 0, stopped_ = 0;
};

// Whether a rank has shown a piece; false if it will not.
bool wait_for(Rank& rank, uint32_t number, int64_t patience) {
    if (spin([] { return kSpin; }, [&] { return has_shown(rank, number); })) return true;
    Watch watch(rank, patience);
    int64_t looked = nanoseconds();
    bool is_lost = false;
    rank.asleep.fetch_add(1);
    while (!has_shown(rank, number) && !is_lost) {
        sleep_on(rank.shown, number - 1);
        if (nanoseconds() - looked < kLook) continue;
        is_lost = watch.gives_up() && !has_shown(rank, number);
        looked = nanoseconds();
    }
    rank.asleep.fetch_sub(1);
    return !is_lost;
}

char* slot(Segment* segment, int64_t rank, uint32_t number) {
    return reinterpret_cast<char*>(segment) + kSlots + (2 * rank + number % 2) * segment->most_bytes;
}

}  // namespace

Exchange::Exchange(void* segment, int64_t rank) : segment_(static_cast<Segment*>(segment)), rank_(rank) {}

int64_t Exchange::ranks() const { return segment_->ranks; }

int64_t Exchange::most_bytes() const { return segment_->most_bytes; }

void* Exchange::place() const { return slot(segment_, rank_, segment_->rank[rank_].shown.load() + 1); }

const void* Exchange::piece(int64_t rank) const {
    return slot(segment_, rank, segment_->rank[rank_].shown.load());  // the others may have shown their next
}

int64_t Exchange::meet() {
    Rank& own = segment_->rank[rank_];
    if (own.lost) return own.lost;
    const uint32_t number = own.shown.load() + 1;
    own.shown.store(number);
    if (own.asleep.load()) wake_sleepers(own.shown);
    for (int64_t rank = 0; rank < segment_->ranks && !own.lost; ++rank) {
        if (!wait_for(segment_->rank[rank], number, segment_->patience)) own.lost = static_cast<int32_t>(1 + rank);
    }
    return own.lost;
}

}  // namespace quire
