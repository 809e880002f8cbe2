// The threads of rmsnorm/cpu/native share out thousands of small jobs: those of the library, and pools of this file in place
// of XLA's and OpenMP's. A sanitizer watches them:
//
//     g++ -std=c++20 -g -O1 -fsanitize=thread -I rmsnorm/cpu/native tests/native/protocol.cpp rmsnorm/cpu/native/threads.cpp
//
// With -DOLD_ORDER a thread reads the job once more after it has counted itself out, as a former version did to learn how
// many threads there are. The sanitizer then reports it (-fsanitize=address: heap-use-after-free).
#include "threads.h"

#include <signal.h>
#include <unistd.h>
#include <sys/wait.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <new>
#include <random>
#include <thread>
#include <utility>
#include <vector>

using namespace rmsnorm;

namespace {

void expect(bool is_so, const char* what) {
    if (is_so) return;
    std::fprintf(stderr, "protocol: %s\n", what);
    std::exit(1);
}

// Like XLA's pool: it calls each task once, perhaps long after the call that scheduled it has returned.
class FakePool {
    std::mutex mutex;
    std::condition_variable has_work;
    std::deque<std::pair<Task*, void*>> queue;
    bool is_closed = false;
    std::vector<std::thread> threads;
    int scheduled = 0;

    void serve() {
        for (;;) {
            std::unique_lock lock(mutex);
            has_work.wait(lock, [&] { return is_closed || !queue.empty(); });
            if (queue.empty()) return;
            const auto [task, argument] = queue.front();
            queue.pop_front();
            const bool is_late = queue.size() % 3 == 0;
            lock.unlock();
            if (is_late) std::this_thread::yield();
            task(argument);
#ifdef OLD_ORDER
            static std::atomic<std::int64_t> seen;
            seen += static_cast<Job*>(argument)->chunks;
#endif
        }
    }

public:
    explicit FakePool(int count) {
        for (int i = 0; i < count; ++i) threads.emplace_back([this] { serve(); });
    }
    ~FakePool() {
        {
            std::lock_guard lock(mutex);
            is_closed = true;
        }
        has_work.notify_all();
        for (auto& thread : threads) thread.join();
    }
    static bool schedule(void* context, Task* task, void* argument) {
        auto& pool = *static_cast<FakePool*>(context);
        std::lock_guard lock(pool.mutex);
        if (++pool.scheduled % 7 == 0) return false;  // it refuses some
        pool.queue.emplace_back(task, argument);
        pool.has_work.notify_one();
        return true;
    }
};

// Like OpenMP's: it starts fewer threads than it could, and waits for all.
void fake_gomp(Task* task, void* argument, unsigned threads, unsigned) {
    std::vector<std::thread> others;
    for (unsigned i = 2; i < threads; ++i) others.emplace_back(task, argument);
    task(argument);
    for (auto& other : others) other.join();
}

struct Sums {
    std::vector<std::int64_t> counts;  // how often each chunk was computed: not atomic, so that a race is seen
};

void count(const void* context, std::int64_t chunk) { ++static_cast<Sums*>(const_cast<void*>(context))->counts[chunk]; }

void call(const Pool& pool, std::int64_t chunks) {
    Sums sums{std::vector<std::int64_t>(chunks)};
    share_out(pool, chunks, count, &sums);
    for (const auto times : sums.counts) expect(times == 1, "a chunk was not computed once");
}

void call_many(Pool pool, int calls, unsigned seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < calls; ++i) {
        pool.threads = 1 + random() % 6;
        call(pool, random() % 20);
    }
}

thread_local int allocations_left = -1;  // that succeed; below 0 all do

}  // namespace

void* operator new(std::size_t size) {
    if (allocations_left == 0) throw std::bad_alloc();
    if (allocations_left > 0) --allocations_left;
    if (void* memory = std::malloc(size)) return memory;
    throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

// Before any worker has started: the memory may not do for the job, for the queue, or for a thread. No signal stays blocked.
void call_without_memory() {
    for (int left = 0; left < 4; ++left) {
        Sums sums{std::vector<std::int64_t>(8)};
        allocations_left = left;
        share_out({3}, 8, count, &sums);
        allocations_left = -1;
        for (const auto times : sums.counts) expect(times == 1, "a chunk was not computed once where memory is short");
        sigset_t blocked;
        pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
        expect(!sigismember(&blocked, SIGINT), "signals stay blocked");
    }
}

}  // namespace

int main(int count, char** arguments) {
    const int calls = count > 1 ? std::atoi(arguments[1]) : 5000;
    call_without_memory();
    FakePool fake(4);
    std::vector<std::thread> callers;
    for (unsigned i = 0; i < 3; ++i)  // they share the pools
        callers.emplace_back([&, i] {
            call_many({1, nullptr, FakePool::schedule, &fake}, calls, i);
            call_many({}, calls, i);
            call_many({1, fake_gomp}, calls / 50, i);
        });
#if !defined(__SANITIZE_THREAD__)  // which does not follow threads into a forked process
    for (int i = 0; i < 50; ++i) {
        const auto child = fork();
        if (child == 0) {
            call_many({}, 50, i);
            _exit(0);
        }
        int status;
        waitpid(child, &status, 0);
        expect(status == 0, "a forked process failed");
    }
#endif
    for (auto& caller : callers) caller.join();
    std::puts("protocol: ok");
}
