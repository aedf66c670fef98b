// SPDX-License-Identifier: Apache-2.0
// The team: threads that wait for a job and take pieces of it, beside the thread that brings it, the leader.
//
// A job is a loop. Its indices are split into one share per thread, the same for the same loop, so that a thread finds the
// data of its last turn in its caches and its memory. A share is claimed in pieces, and a thread that has finished its own
// claims pieces of the others (affinity scheduling: Markatos and LeBlanc, 1994). So no thread waits for one that has not
// come: a thread that sleeps, or that the system has suspended, delays only its current piece.
//
// A waiting thread spins for a bounded time and then sleeps. While a recorded graph is replayed (`Session`), threads spin
// for longer than any single-threaded part of it takes, so none falls asleep within a token, and each job costs the
// hand-over of two cache lines. Outside of a session they soon sleep: other processes need the cores.

#include "team.h"

#include "float_mode.h"
#include "quire_cpu.h"
#include "threads.h"

namespace quire {
namespace {

constexpr int64_t kMostThreads = 512;
constexpr int64_t kPieces = 32;  // that a share is cut into, where it has as many indices

// Multiply-adds that take as long as handing over a job, and as long as waking threads besides.
constexpr int64_t kHandOverWork = 1 << 17, kWakeUpWork = 1 << 19;

constexpr int64_t kMicrosecond = 1000;
constexpr int64_t kSpinInSession = 200 * kMicrosecond, kSpinBetween = 25 * kMicrosecond, kSpinForLast = 50 * kMicrosecond;

using Body = void (*)(const void*, int64_t, int64_t);

struct Job {
    uint64_t number;
    Body body;
    const void* context;
    int64_t count, threads;
    uint64_t seed;  // of the order in which pieces are taken; 0 is that of indices

    int64_t share_begin(int64_t share) const {
        const int64_t most = count % threads;
        return count / threads * share + (share < most ? share : most);
    }
    int64_t piece_size() const {
        const int64_t size = count / (threads * kPieces);
        return size > 1 ? size : 1;
    }
    int64_t pieces(int64_t share) const {
        return (share_begin(share + 1) - share_begin(share) + piece_size() - 1) / piece_size();
    }
    // Whose share the i-th to come to a thread is, and which piece of it the i-th to be taken is. The numbers 1 to 255 have no
    // factor in common with the primes, so each piece is taken once.
    int64_t share_at(int64_t thread, int64_t i) const { return (thread + i + static_cast<int64_t>(seed % 7)) % threads; }
    int64_t piece_at(int64_t i, int64_t pieces) const {
        constexpr int64_t primes[] = {257, 263, 269, 271, 277, 281, 283, 293};
        return seed ? (i * primes[seed % 8] + static_cast<int64_t>(seed % 251)) % pieces : i;
    }
};

// Where the present job stands for everybody to read. Its number is odd while it changes, and grows for ever.
class Board {
public:
    std::atomic<uint64_t> number{0};
    std::atomic<uint64_t> seed{0};  // of jobs to come

    void post(Body body, const void* context, int64_t count, int64_t threads) {
        const uint64_t before = number.load(std::memory_order_relaxed);
        number.store(before + 1, std::memory_order_relaxed);
        // Each is a release: a reader of a new one also sees that the number has changed.
        body_.store(body, std::memory_order_release);
        context_.store(context, std::memory_order_release);
        count_.store(count, std::memory_order_release);
        threads_.store(threads, std::memory_order_release);
        seed_.store(seed.load(std::memory_order_relaxed), std::memory_order_release);
        number.store(before + 2);
    }

    // Replaces the job, which may be half written, by an empty one.
    void clear() {
        number.store((number.load() | 1) + 1);
        post(nullptr, nullptr, 0, 0);
    }

    // The job, unless it changes meanwhile.
    bool read(Job& job) const {
        job.number = number.load(std::memory_order_acquire);
        job.body = body_.load(std::memory_order_acquire);
        job.context = context_.load(std::memory_order_acquire);
        job.count = count_.load(std::memory_order_acquire);
        job.threads = threads_.load(std::memory_order_acquire);
        job.seed = seed_.load(std::memory_order_acquire);
        return job.number % 2 == 0 && number.load(std::memory_order_relaxed) == job.number;
    }

private:
    std::atomic<Body> body_{nullptr};
    std::atomic<const void*> context_{nullptr};
    std::atomic<int64_t> count_{0}, threads_{0};
    std::atomic<uint64_t> seed_{0};
};

// Progress of a share: the job's number and the count of claimed pieces. An earlier job's number means that no piece is
// claimed yet, so no thread has to clear it. A finished job leaves no share unclaimed: a thread that comes late gets nothing.
class alignas(64) Share {
public:
    // The next piece, or -1.
    int64_t take(const Job& job, int64_t pieces) {
        const uint64_t own = job.number << kPieceBits;
        uint64_t seen = taken_.load(std::memory_order_relaxed);
        for (;;) {
            const uint64_t next = seen < own ? own : seen;
            if (next - own >= static_cast<uint64_t>(pieces)) return -1;
            if (taken_.compare_exchange_weak(seen, next + 1, std::memory_order_relaxed)) {
                return static_cast<int64_t>(next - own);
            }
        }
    }

private:
    static constexpr int kPieceBits = 8;
    static_assert(2 * kPieces + 1 < 1 << kPieceBits, "a share's pieces can be counted");
    std::atomic<uint64_t> taken_{0};
};

thread_local bool in_body = false;     // what is shared there is not shared again
thread_local bool has_turn = false;    // this thread leads
thread_local int64_t offered = 0;      // work of a session that was not worth waking anybody

class Team {
public:
    std::atomic<int64_t> threads{1};  // wanted

    // Whether there are others, and handing over, and if need be waking them, takes less than they gain.
    bool is_worth(int64_t work) {
        if (startable() < 2) return false;
        if (board_.seed.load(std::memory_order_relaxed)) return true;  // a test wants to see all loops shared
        if (work < kHandOverWork) return false;
        if (is_awake()) return true;
        offered = session_.load(std::memory_order_relaxed) ? offered + work : work;
        if (offered < kWakeUpWork) return false;
        offered = 0;
        return true;
    }

    // Called by the leader.
    void run(Body body, const void* context, int64_t count) {
        const int64_t most = start_threads(threads.load(std::memory_order_relaxed));
        left_.store(count, std::memory_order_relaxed);
        board_.post(body, context, count, most < count ? most : count);
        workers_.wake();
        Job job;
        board_.read(job);
        in_body = true;
        work_on(job, 0);
        in_body = false;
        leader_.wait([] { return kSpinForLast; }, [&] { return left_.load() == 0; });
    }

    void begin_turn() {
        pthread_mutex_lock(&turn_);
        has_turn = true;
    }
    void end_turn() {
        has_turn = false;
        pthread_mutex_unlock(&turn_);
    }
    void begin_session() {
        offered = 0;
        session_.store(true, std::memory_order_relaxed);
    }
    void end_session() { session_.store(false, std::memory_order_relaxed); }

    int64_t pin(const int64_t* cpus, int64_t count) {
        const int64_t started = start_threads(count);
        int64_t refused = count - started;
        for (int64_t index = 1; index < started; ++index) refused += !keep_on(ids_[index], cpus[index]);
        return refused;
    }

    void want(int64_t count) {
        threads.store(count < 1 ? 1 : count < kMostThreads ? count : kMostThreads);
        most_.store(kMostThreads, std::memory_order_relaxed);
        surplus_.wake();
    }

    void shuffle(uint64_t seed) { board_.seed.store(seed, std::memory_order_relaxed); }

    // In a forked process: of the threads only the one that forked is left, and it is in no body.
    void restart() {
        pthread_mutex_init(&turn_, nullptr);
        workers_.restart();
        surplus_.restart();
        leader_.restart();
        started_.store(1);
        session_.store(false);
        board_.clear();
        has_turn = in_body = false;
    }

private:
    int64_t startable() const {
        const int64_t wanted = threads.load(std::memory_order_relaxed), most = most_.load(std::memory_order_relaxed);
        return wanted < most ? wanted : most;
    }
    bool is_awake() const { return started_.load(std::memory_order_relaxed) >= startable() && !workers_.any_asleep(); }

    // How many there are, up to `wanted`, the leader among them; fewer if the system refuses.
    int64_t start_threads(int64_t wanted) {
        int64_t started = started_.load(std::memory_order_relaxed);
        if (started < wanted && started < most_.load(std::memory_order_relaxed)) {
            for (; started < wanted && start_thread(ids_[started], serve, started); ++started) {}
            if (started < wanted) most_.store(started, std::memory_order_relaxed);
            started_.store(started, std::memory_order_relaxed);
        }
        return started < wanted ? started : wanted;
    }

    static void* serve(void* index);

    [[noreturn]] void serve_as(int64_t index) {
        in_body = true;
        set_float_mode(kFloatMode);
        uint64_t last = 0;
        const auto changed = [&] { return board_.number.load() != last; };
        for (;;) {
            surplus_.wait([] { return int64_t{0}; }, [&] { return index < threads.load(); });
            workers_.wait([&] { return session_.load(std::memory_order_relaxed) ? kSpinInSession : kSpinBetween; },
                              changed);
            Job job;
            if (!board_.read(job)) continue;
            last = job.number;
            if (index < job.threads) work_on(job, index);
        }
    }

    void work_on(const Job& job, int64_t index) {
        int64_t done = 0;
        for (int64_t i = 0; i < job.threads; ++i) {
            const int64_t share = job.share_at(index, i);
            const int64_t pieces = job.pieces(share), end = job.share_begin(share + 1);
            for (int64_t taken; (taken = shares_[share].take(job, pieces)) >= 0;) {
                const int64_t begin = job.share_begin(share) + job.piece_at(taken, pieces) * job.piece_size();
                const int64_t stop = end - begin < job.piece_size() ? end : begin + job.piece_size();
                job.body(job.context, begin, stop);
                done += stop - begin;
            }
        }
        if (done && left_.fetch_sub(done) == done) leader_.wake();
    }

    alignas(64) Board board_;
    alignas(64) std::atomic<int64_t> left_{0};  // indices of the job that are not done
    alignas(64) Share shares_[kMostThreads];
    WaitingRoom workers_, surplus_, leader_;
    std::atomic<int64_t> started_{1};            // the leader among them
    std::atomic<int64_t> most_{kMostThreads};    // less, once the system has refused one
    std::atomic<bool> session_{false};
    pthread_mutex_t turn_ = PTHREAD_MUTEX_INITIALIZER;
    pthread_t ids_[kMostThreads] = {};
};

// Never destroyed: its threads wait in it while the process ends.
Team team;

void* Team::serve(void* index) {
    team.serve_as(static_cast<int64_t>(reinterpret_cast<intptr_t>(index)));
}

// Registered at load: a process may fork before the team has threads, while another thread has its first turn.
[[maybe_unused]] const int restarts_in_child = pthread_atfork(nullptr, nullptr, [] { team.restart(); });

// The team serves one thread at a time: others that compute wait for their turn.
class Turn {
public:
    Turn() : begins_(!has_turn) {
        if (begins_) team.begin_turn();
    }
    ~Turn() {
        if (begins_) team.end_turn();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

private:
    bool begins_;
};

}  // namespace

void run_shared(int64_t count, int64_t work, Body body, const void* context) {
    if (count < 1) return;
    if (count == 1 || in_body || !team.is_worth(work)) return body(context, 0, count);
    const Turn turn;
    team.run(body, context, count);
}

Session::Session() : begins_(!has_turn) {
    if (!begins_) return;
    team.begin_turn();
    team.begin_session();
}

Session::~Session() {
    if (!begins_) return;
    team.end_session();
    team.end_turn();
}

int64_t team_threads() { return team.threads.load(std::memory_order_relaxed); }

}  // namespace quire

int64_t quire_cpu_set_threads(int64_t count) {
    quire::team.want(count);
    return quire::team_threads();
}

int64_t quire_cpu_pin_threads(const int64_t* cpus, int64_t count) {
    const quire::Turn turn;
    return quire::team.pin(cpus, count);
}

void quire_cpu_shuffle(int64_t seed) { quire::team.shuffle(static_cast<uint64_t>(seed)); }

void quire_cpu_share(int64_t count, int64_t work, void (*body)(const void*, int64_t, int64_t), const void* context) {
    quire::run_shared(count, work, body, context);
}
