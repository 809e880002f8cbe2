// f(z) of gates of 16 bits, which have 65,536 numbers, from tables: that takes a third of the time of an exponential, or less.
//
// A table holds what gate.h computes. It is filled where it is first needed, without a lock: a process that is forked while a
// thread fills a table would find the lock taken for ever. Threads that come at once fill it together, with the same numbers.
#pragma once

#include "gate.h"
#include "statistic.h"

namespace rmsnorm::RMSNORM_LEVEL {

constexpr bool has_table(Format gate) { return gate == Format::f16 || gate == Format::bf16; }

// Calls body(j, z) for each eight of the 65,536 numbers.
template <Format Z, class Body>
inline void by_numbers(Body body) {
    for (int j = 0; j < 0x10000; j += lanes) {
        std::uint16_t words[lanes];
        for (int i = 0; i < lanes; ++i) words[i] = static_cast<std::uint16_t>(j + i);
        body(j, load<Z>(words));
    }
}

// f(z) and f'(z) beside each other.
struct Factor {
    double f, slope;
};

// A table of T for the numbers of a format. As a static variable it has no guard: its first bytes are 0.
template <class T>
struct Table {
    T of[0x10000];
    bool is_full;

    // Fills it by fill(table), unless it is full.
    template <class Fill>
    const T* filled(Fill fill) {
        if (!__atomic_load_n(&is_full, __ATOMIC_ACQUIRE)) {
            fill(*this);
            __atomic_store_n(&is_full, true, __ATOMIC_RELEASE);
        }
        return of;
    }
};

// As another thread may write the same number.
inline void write(double* to, double number) { __atomic_store(to, &number, __ATOMIC_RELAXED); }

// 1 + exp(-z), which counts where z is moderate; null if the format has no table.
template <Format Z>
inline const double* divisor_table() {
    if constexpr (has_table(Z)) {
        static Table<double> table;
        return table.filled([](Table<double>& own) {
            by_numbers<Z>([&own](int j, const D& z) {
                double divisors[lanes];
                store_plain(divisors, divisor_of(z));
                for (int i = 0; i < lanes; ++i) write(own.of + j + i, divisors[i]);
            });
        });
    }
    return nullptr;
}

template <Format Z, Function F>
inline const Factor* factor_table() {
    static Table<Factor> table;
    return table.filled([](Table<Factor>& own) {
        by_numbers<Z>([&own](int j, const D& z) {
            double f[lanes], slope[lanes];
            D steep;
            store_plain(f, factor(F, z, &steep));
            store_plain(slope, steep);
            for (int i = 0; i < lanes; ++i) {
                write(&own.of[j + i].f, f[i]);
                write(&own.of[j + i].slope, slope[i]);
            }
        });
    });
}

template <Format Z>
inline const Factor* factor_table(Function function) {
    if constexpr (has_table(Z)) {
        return function == Function::silu ? factor_table<Z, Function::silu>() : factor_table<Z, Function::sigmoid>();
    }
    return nullptr;
}

typedef double Two __attribute__((vector_size(16)));
typedef double Four __attribute__((vector_size(32)));

RMSNORM_INLINE Four joined(Two a, Two b) { return __builtin_shufflevector(a, b, 0, 1, 2, 3); }

// The numbers of a table for the gates of a register.
RMSNORM_INLINE Part read(const double* table, const std::uint16_t* z) {
    auto two = [=](int i) RMSNORM_BODY { return Two{table[z[i]], table[z[i + 1]]}; };
#if defined(__AVX512F__)
    return __builtin_shufflevector(joined(two(0), two(2)), joined(two(4), two(6)), 0, 1, 2, 3, 4, 5, 6, 7);
#elif defined(__AVX2__)
    return joined(two(0), two(2));
#else
    return two(0);
#endif
}

RMSNORM_INLINE PartFactor read(const Factor* table, const std::uint16_t* z) {
    auto pair = [=](int i) RMSNORM_BODY {
        Two both;
        std::memcpy(&both, table + z[i], sizeof both);
        return both;
    };
#if defined(__AVX512F__)
    Four a = joined(pair(0), pair(2)), b = joined(pair(4), pair(6)), c = joined(pair(1), pair(3)), d = joined(pair(5), pair(7));
    Part even = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7), odd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7);
    return {_mm512_unpacklo_pd(even, odd), _mm512_unpackhi_pd(even, odd)};
#elif defined(__AVX2__)
    Four even = joined(pair(0), pair(2)), odd = joined(pair(1), pair(3));
    return {_mm256_unpacklo_pd(even, odd), _mm256_unpackhi_pd(even, odd)};
#else
    Two even = pair(0), odd = pair(1);
    return {Part{even[0], odd[0]}, Part{even[1], odd[1]}};
#endif
}

// A row of gates, and their table, which is null for formats that have none.
template <Format Z, class T>
struct Gates {
    const Stored<Z>* z;
    const T* table;

    // Calls body(words) with eight gates, or with the first ones and zeros.
    template <class Body>
    RMSNORM_INLINE void with_words(std::int64_t j, int count, Body body) const {
        if (count == lanes) return body(z + j);
        Stored<Z> words[lanes] = {};
        copy_first(words, z + j, count);
        body(static_cast<const Stored<Z>*>(words));
    }

    // 1 + exp(-z), which counts where z is moderate.
    RMSNORM_INLINE D divisors(std::int64_t j, int count, const D& own) const {
        if constexpr (!has_table(Z)) {
            return divisor_of(own);
        } else {
            D result;
            with_words(j, count, [&, this](const Stored<Z>* words) RMSNORM_BODY {
                for (int i = 0; i < parts; ++i) result.part[i] = read(table, words + i * native);
            });
            return result;
        }
    }

    // f(z) and f'(z).
    RMSNORM_INLINE D factors(Function function, std::int64_t j, int count, D& slope) const {
        if constexpr (!has_table(Z)) {
            return factor(function, count == lanes ? load<Z>(z + j) : load_first<Z>(z + j, count), &slope);
        } else {
            D f;
            with_words(j, count, [&, this](const Stored<Z>* words) RMSNORM_BODY {
                for (int i = 0; i < parts; ++i) {
                    PartFactor both = read(table, words + i * native);
                    f.part[i] = both.f, slope.part[i] = both.slope;
                }
            });
            return f;
        }
    }
};

// A row of gates with the table of 1 + exp(-z), and with that of f(z) and f'(z).
template <Format Z>
inline Gates<Z, double> gates_with_divisors(const std::byte* gates) {
    return {as<Stored<Z>>(gates), divisor_table<Z>()};
}

template <Format Z>
inline Gates<Z, Factor> gates_with_factors(Function function, const std::byte* gates) {
    return {as<Stored<Z>>(gates), factor_table<Z>(function)};
}

}  // namespace rmsnorm::RMSNORM_LEVEL
