// The threads of one call, and the threads of this library, which serve where neither OpenMP nor XLA does.
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

namespace rmsnorm {
namespace {

// A thread counts itself as busy before it takes a chunk. So a caller that finds no chunk left, and then no busy thread,
// knows that all chunks are done.
void work(Job& job) {
    job.busy.fetch_add(1);
    {
        StandardArithmetic standard;
        for (auto chunk = job.next.fetch_add(1); chunk < job.chunks; chunk = job.next.fetch_add(1))
            job.compute(job.context, chunk);
    }
    job.busy.fetch_sub(1);
}

// Once a thread has counted itself out, another one may free the job: after that it must not even read it.
void leave(Job* job) {
    if (job->owners.fetch_sub(1) == 1) delete job;
}

void work_for_gomp(void* job) { work(*static_cast<Job*>(job)); }

void work_and_leave(void* job) {
    work(*static_cast<Job*>(job));
    leave(static_cast<Job*>(job));
}

}  // namespace

void share_out(const Pool& pool, std::int64_t chunks, Compute* compute, const void* context) {
    if (pool.gomp_parallel) {  // always as many threads: libgomp ends and starts threads where the number changes
        Job job(compute, context, chunks, 1);
        pool.gomp_parallel(work_for_gomp, &job, static_cast<unsigned>(pool.threads), 0);
        return;
    }
    const auto threads = std::min(pool.threads, chunks);
    Job* job = threads > 1 ? new (std::nothrow) Job(compute, context, chunks, threads) : nullptr;
    if (!job) {
        for (std::int64_t chunk = 0; chunk < chunks; ++chunk) compute(context, chunk);
        return;
    }
    for (std::int64_t i = 1; i < threads; ++i)
        if (!pool.schedule(pool.context, work_and_leave, job)) leave(job);  // in place of the thread that will not come
    work(*job);
    while (job->busy.load()) sched_yield();
    leave(job);
}

namespace {

struct Workers {
    std::mutex mutex;
    std::condition_variable has_work;
    std::vector<std::pair<Task*, void*>> queue;
    std::size_t idle = 0, started = 0;
};

// Nothing destroys the workers' memory: when the process ends they still wait in it.
alignas(Workers) std::byte memory[sizeof(Workers)];

Workers& workers() { return *std::launder(reinterpret_cast<Workers*>(memory)); }

void make_workers() { new (memory) Workers; }

// A forked child has none of its parent's threads, and perhaps a mutex that one of them held. It makes all anew, in the same
// place, and forgets the parent's queue. This is set up when the library is loaded, so that no fork comes in between.
const bool is_ready = (make_workers(), pthread_atfork(nullptr, nullptr, make_workers) == 0);
const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());

void serve() {
    auto& own = workers();
    for (;;) {
        std::unique_lock lock(own.mutex);
        ++own.idle;
        own.has_work.wait(lock, [&] { return !own.queue.empty(); });
        --own.idle;
        const auto [task, argument] = own.queue.front();
        own.queue.erase(own.queue.begin());
        lock.unlock();
        task(argument);
    }
}

// A worker handles no signals. So they interrupt the thread of the program that waits for them.
bool start_worker() {
    sigset_t all, former;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &former);
    bool has_started = true;
    try {
        std::thread(serve).detach();
    } catch (const std::exception&) {  // no thread more, or no memory for one
        has_started = false;
    }
    pthread_sigmask(SIG_SETMASK, &former, nullptr);
    return has_started;
}

}  // namespace

bool schedule_own(void*, Task* task, void* argument) {
    if (!is_ready) return false;
    auto& own = workers();
    std::lock_guard lock(own.mutex);
    try {
        own.queue.emplace_back(task, argument);
    } catch (const std::bad_alloc&) {
        return false;
    }
    if (own.queue.size() > own.idle && own.started < cores && start_worker()) ++own.started;
    if (own.started == 0) {
        own.queue.pop_back();
        return false;
    }
    own.has_work.notify_one();
    return true;
}

}  // namespace rmsnorm
