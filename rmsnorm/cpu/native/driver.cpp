// A whole call, from the choice of the kernels to the gradients of the parameters.
#include "call.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace rmsnorm {
namespace {

constexpr std::int64_t least_chunk = 1 << 15;  // elements: below, one thread is as fast as two
constexpr std::int64_t columns_of_chunk = 4096;  // whose sums, of float64, stay in a core's cache
constexpr std::align_val_t line{64};           // bytes of a line of the cache

struct Level {
    const char* name;
    bool is_here;  // whether the processor has it
    const Kernels* (*kernels)();
};

#if defined(__x86_64__)
// Older versions of clang do not know the name "f16c" in __builtin_cpu_supports.
bool has_f16c() {
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

const Kernels* choose() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c() &&
                    __builtin_cpu_supports("bmi2");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
    const Level levels[] = {
        {"v4-bf16", v4 && __builtin_cpu_supports("avx512bf16"), kernels_v4_bf16},
        {"v4", v4, kernels_v4},
        {"v3", v3, kernels_v3},
    };
#else
    const Level levels[] = {{"arm64", true, kernels_arm64}};
#endif
    const char* wanted = std::getenv("RMSNORM_CPU_LEVEL");
    const bool any = !wanted || !*wanted;
    for (const auto& level : levels)
        if (level.is_here && (any || !std::strcmp(wanted, level.name)))
            if (const auto* found = level.kernels()) return found;
    return nullptr;
}

std::int64_t quotient_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

struct Delete {
    void operator()(double* numbers) const { operator delete(numbers, line); }
};

// Null if memory is short.
std::unique_ptr<double, Delete> numbers(std::int64_t count) {
    if (count > PTRDIFF_MAX / std::int64_t{sizeof(double)}) return nullptr;
    return std::unique_ptr<double, Delete>(static_cast<double*>(operator new(count * sizeof(double), line, std::nothrow)));
}

// Calls body(chunk) for each chunk, on the threads of the pool.
template <class Body>
void for_each_chunk(const Pool& pool, std::int64_t chunks, const Body& body) {
    const auto compute = [](const void* context, std::int64_t chunk) { (*static_cast<const Body*>(context))(chunk); };
    share_out(pool, chunks, compute, &body);
}

}  // namespace

const Kernels* kernels() {
    static const Kernels* const chosen = choose();
    return chosen;
}

bool forward(const Call& call, const Forward& arrays, const Pool& pool) {
    const StandardArithmetic standard;
    const Kernels& own = *kernels();
    const auto parameters = numbers(call.parameters());
    if (!parameters) return false;
    own.prepare(call, arrays.scale, arrays.bias, false, parameters.get());
    const bool alone = pool.threads < 2;
    const auto step = alone ? std::max<std::int64_t>(call.rows, 1)
                            : std::max(quotient_up(least_chunk, call.width()), quotient_up(call.rows, 8 * pool.threads));
    for_each_chunk(pool, quotient_up(call.rows, step), [&](std::int64_t chunk) {
        own.forward(call, arrays, parameters.get(), chunk * step, std::min((chunk + 1) * step, call.rows));
    });
    return true;
}

bool backward(const Call& call, const Backward& arrays, const Pool& pool) {
    const StandardArithmetic standard;
    const Kernels& own = *kernels();
    const auto pair = 2 * call.width(), chunks = quotient_up(call.rows, call.step);
    const bool alone = pool.threads < 2 || chunks < 2;
    const auto own_parameters = numbers(call.parameters()), own_sums = numbers(pair * (alone ? 2 : chunks));
    if (!own_parameters || !own_sums) return false;
    double *const parameters = own_parameters.get(), *const sums = own_sums.get();
    own.prepare(call, arrays.scale, nullptr, true, parameters);
    if (pool.threads > 1 && chunks == 1 && call.rows > 1 && call.rows * call.width() >= 16 * least_chunk) {
        // A few wide rows are one task, as sums of their own would cost more than the rows. So threads share out the rows
        // for dx, and then the columns for the sums, each of which is added in the same order.
        const auto factors = numbers(call.rows * call.groups);
        if (!factors) return false;
        Backward rows = arrays, columns = arrays;
        rows.dscale = rows.dbias = nullptr, rows.found = factors.get(), columns.inverse_rms = factors.get();
        for_each_chunk(pool, call.rows, [&](std::int64_t i) { own.backward(call, rows, parameters, sums, i, i + 1); });
        if (arrays.dscale || arrays.dbias)
            for_each_chunk(pool, quotient_up(call.width(), columns_of_chunk), [&](std::int64_t chunk) {
                const auto from = chunk * columns_of_chunk;
                own.sum_columns(call, columns, sums, from, std::min(from + columns_of_chunk, call.width()));
            });
    } else if (alone) {  // in the same order as `finish` adds the sums of several threads
        double* others = sums + pair;
        for (std::int64_t first = 0; first < call.rows; first += call.step) {
            const auto last = std::min(first + call.step, call.rows);
            own.backward(call, arrays, parameters, first ? others : sums, first, last);
            if (!first) continue;
            const auto from = arrays.dscale ? 0 : call.width(), to = arrays.dbias ? pair : call.width();
            for (std::int64_t j = from; j < to; ++j) sums[j] += others[j];
        }
    } else {
        for_each_chunk(pool, chunks, [&](std::int64_t chunk) {
            const auto first = chunk * call.step, last = std::min(first + call.step, call.rows);
            own.backward(call, arrays, parameters, sums + chunk * pair, first, last);
        });
    }
    own.finish(call, arrays, sums, alone ? 1 : chunks);
    return true;
}

}  // namespace rmsnorm
