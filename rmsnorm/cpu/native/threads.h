// Chunks of work shared out among threads: each free thread takes the next chunk. The caller's own thread is one of them.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace rmsnorm {

// While it lives, this thread computes by the standard rules of floating point. XLA's threads take subnormal numbers as 0,
// and a program may set the same for its own.
class StandardArithmetic {
#if defined(__x86_64__)
    unsigned former = _mm_getcsr();

public:
    StandardArithmetic() { _mm_setcsr(0x1f80); }
    ~StandardArithmetic() { _mm_setcsr(former); }
#else
    std::uint64_t former;

public:
    StandardArithmetic() {
        asm volatile("mrs %0, fpcr" : "=r"(former));
        asm volatile("msr fpcr, %0" ::"r"(std::uint64_t{0}));
    }
    ~StandardArithmetic() { asm volatile("msr fpcr, %0" ::"r"(former)); }
#endif
    StandardArithmetic(const StandardArithmetic&) = delete;
};

using Task = void(void*);

// Lets another thread call the task with the argument, now or later. False if no thread will.
using Schedule = bool(void* context, Task* task, void* argument);

// GOMP_parallel of a libgomp that the process has loaded. It returns when all of its threads have left the task.
using GompParallel = void(Task* task, void* argument, unsigned threads, unsigned flags);

// The threads of this library. They start when they are first needed, and wait for work until the process ends.
Schedule schedule_own;

// Where the threads of a call come from. PyTorch's OpenMP threads take part if there is a `gomp_parallel`.
struct Pool {
    std::int64_t threads = 1;  // the caller is one of them
    GompParallel* gomp_parallel = nullptr;
    Schedule* schedule = schedule_own;
    void* context = nullptr;  // of `schedule`; only the caller uses it, before `share_out` returns
};

// Computes one chunk.
using Compute = void(const void* context, std::int64_t chunk);

// Computes the chunks 0 to `chunks` - 1 on the threads of the pool, each once, in any order. Returns when all are done. It
// waits for no thread that has not begun: if all are busy, or memory is short, the caller does all by itself.
void share_out(const Pool& pool, std::int64_t chunks, Compute* compute, const void* context);

// What the threads of one `share_out` have in common. A thread that comes late finds no chunk left. It reads nothing but
// the job, as the caller has returned by then. The last one to leave frees the job, except with OpenMP, where the job is
// a variable of the caller.
struct Job {
    Compute* const compute;
    const void* const context;
    const std::int64_t chunks;
    std::atomic<std::int64_t> owners;   // threads that have not left, and the caller
    std::atomic<std::int64_t> next{0};  // the next chunk that no thread has taken
    std::atomic<std::int64_t> busy{0};  // threads that may be computing a chunk

    Job(Compute* compute, const void* context, std::int64_t chunks, std::int64_t owners)
        : compute(compute), context(context), chunks(chunks), owners(owners) {}
};

}  // namespace rmsnorm
