// Gated rows whose elements all count.
//
//     after:   y = n f(z),           dz = dy n f'(z),     n = h / rho * (o + scale) + bias, which gets dy f(z) for its dy
//     before:  h = x f(z),           dz = dh x f'(z),     dx = dh f(z)
#pragma once

#include "forward.h"
#include "row.h"
#include "tables.h"

namespace rmsnorm::RMSNORM_LEVEL {

// A row of y in bfloat16, multiplied by f(z), in float32 arithmetic; see single.h.
template <Format X, Format Z, bool BEFORE>
inline void fill_gated(
    const Call& c, const Stored<X>* h, const double* gain, const float* gain32, Quotient q, const Stored<Z>* z,
    std::uint16_t* y) {
    Float inverse = all_singles(static_cast<float>(1 / q.rho));
    bool cuts = BEFORE && c.product == Format::bf16;
    auto again = [=, &c](std::int64_t from, std::int64_t to) {
        double exact[singles];
        fill<X, Format::f64>(c, h + from, gain + from, nullptr, q, exact, 0, to - from);
        by_eights(to - from, [=, &c, &exact](std::int64_t j, auto count) RMSNORM_BODY {
            D v = load<Format::f64>(exact + j, count) * factor(c.function, load<Z>(z + from + j, count));
            store<Format::bf16>(y + from + j, v, count);
        });
    };
    auto compute = [=, function = c.function](std::int64_t j) RMSNORM_BODY {
        Float g, gate = load_singles<Z>(z + j), v = load_singles<X>(h + j) * inverse;
        std::memcpy(&g, gain32 + j, sizeof g);
        Word doubt = ~(magnitude(gate) <= single_gate);
        if constexpr (BEFORE) {
            doubt |= is_near(v, gated_units) | is_tiny_or_zero(v);
            v = to_bf16(v);
        }
        v *= g;
        if (cuts) v = to_bf16(v);
        v *= factor(function, gate);
        store_singles<Format::bf16>(y + j, v);
        if (any(doubt | is_near(v, gated_units) | is_tiny_or_zero(v))) [[unlikely]] call_rarely(again, j, j + singles);
    };
    by_registers(c.n, compute, again);
}

// Two registers of float64 as one of float32.
RMSNORM_INLINE Float to_singles(Part low, Part high) {
    HalfPart a = to_single(low), b = to_single(high);
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(__AVX2__)
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7);
#else
    return __builtin_shufflevector(a, b, 0, 1, 2, 3);
#endif
}

// A row of y in bfloat16, of h in float64, in float32 arithmetic; see single.h. With BEFORE h / rho is rounded to bfloat16 first.
template <bool BEFORE>
[[gnu::noinline]] void fill_wide(const Call& c, const Group& p, const double* h, Quotient q, std::uint16_t* y) {
    constexpr int units = forward_units + 1;  // h is rounded, too
    Float inverse = all_singles(static_cast<float>(1 / q.rho));
    auto again = [=, &c, gain = p.gain](std::int64_t from, std::int64_t to) {
        fill<Format::f64, Format::bf16>(c, h + from, gain + from, nullptr, q, y + from, 0, to - from);
    };
    auto compute = [=, gain32 = p.single](std::int64_t j) RMSNORM_BODY {
        Part low, high;
        std::memcpy(&low, h + j, sizeof low);
        std::memcpy(&high, h + j + native, sizeof high);
        Float g, v = to_singles(low, high) * inverse;
        std::memcpy(&g, gain32 + j, sizeof g);
        Word doubt = is_tiny_or_zero(v);
        if constexpr (BEFORE) {
            doubt |= is_near(v, units);
            v = to_bf16(v) * g;  // exact, or rounded as the variant says
        } else {
            v *= g;
            doubt |= is_near(v, units);
        }
        store_singles<Format::bf16>(y + j, v);
        doubt |= is_tiny(v);
        if (any(doubt)) [[unlikely]] {  // of zeros there is none
            Part one = all(1.0), none{};
            Word zero = to_singles(choose(low == 0.0, one, none), choose(high == 0.0, one, none)) == 1.0f;
            if (any(doubt & ~zero)) call_rarely(again, j, j + singles);
        }
    };
    by_registers(c.n, compute, again);
}

// A row of y, of h = x f(z) in float64.
template <Format Y>
inline void row_of_wide_h(const Call& c, const Group& p, bool are_moderate, const double* h, double rho, Stored<Y>* y) {
    Quotient q(rho, c.scale != Format::f64);
    if constexpr (Y == Format::bf16) {
        bool is_exact = c.product != Format::f64 && needs_singles(c, false);
        if (is_exact && !p.bias && are_moderate && 0x1p-20 < rho && rho < 0x1p20 && c.k == c.n) {
            if (c.norm == Format::bf16) return fill_wide<true>(c, p, h, q, y);
            if (c.norm == Format::none) return fill_wide<false>(c, p, h, q, y);
        }
    }
    fill<Format::f64, Y>(c, h, p.gain, p.bias, q, y, 0, c.n);
}

// A row of n f(z).
template <Format Y>
[[gnu::noinline]] void fill_product(const Call& c, const double* norm, const std::byte* gates, Stored<Y>* y) {
    with_format(c.gate, [=, &c]<Format Z>() {
        auto own = gates_with_divisors<Z>(gates);
        by_eights(c.n, [=, function = c.function](std::int64_t j, auto count) RMSNORM_BODY {
            D z = load<Z>(own.z + j, count);
            store<Y>(y + j, gated(function, load<Format::f64>(norm + j, count), z, own.divisors(j, count, z)), count);
        });
    });
}

// A row of y. `norm` has room for n numbers.
template <Format X, Format Y>
inline void row_of_gated_y(
    const Call& c, const Group& p, bool are_moderate, const Stored<X>* h, double rho, const std::byte* gates, double* norm,
    Stored<Y>* y) {
    Quotient q(rho, c.scale != Format::f64);
    if constexpr (may_be_single<X, Y> && Y == Format::bf16) {
        bool is_cut = c.norm == Format::bf16;
        if ((is_cut || c.norm == Format::none) && c.gate != Format::f64 && !p.bias && are_moderate && 0x1p-20 < rho &&
            rho < 0x1p20 && c.k == c.n) {
            return with_narrow(c.gate, [&]<Format Z>() {
                const Stored<Z>* z = as<Stored<Z>>(gates);
                if (is_cut) return fill_gated<X, Z, true>(c, h, p.gain, p.single, q, z, y);
                fill_gated<X, Z, false>(c, h, p.gain, p.single, q, z, y);
            });
        }
    }
    fill<X, Format::f64>(c, h, p.gain, p.bias, q, norm, 0, c.n);
    fill_product<Y>(c, norm, gates, y);
}

// A row of x f(z).
template <Format X>
[[gnu::noinline]] void multiply_by_gate(const Call& c, const Stored<X>* x, const std::byte* gates, double* h) {
    with_format(c.gate, [=, &c]<Format Z>() {
        auto own = gates_with_divisors<Z>(gates);
        by_eights(c.n, [=, function = c.function](std::int64_t j, auto count) RMSNORM_BODY {
            D z = load<Z>(own.z + j, count);
            store<Format::f64>(h + j, gated(function, load<X>(x + j, count), z, own.divisors(j, count, z)), count);
        });
    });
}

// f(z) and, if `slope` is not null, f'(z) of a row.
[[gnu::noinline]] inline void factors(const Call& c, const std::byte* gates, double* f, double* slope) {
    with_format(c.gate, [=, &c]<Format Z>() {
        auto own = gates_with_factors<Z>(c.function, gates);
        by_eights(c.n, [=, function = c.function](std::int64_t j, auto count) RMSNORM_BODY {
            D steep;
            store<Format::f64>(f + j, own.factors(function, j, count, steep), count);
            if (slope) store<Format::f64>(slope + j, steep, count);
        });
    });
}

// h = x f(z) of a row, f(z) and f'(z).
[[gnu::noinline]] inline void multiply_by_factors(
    const Call& c, const double* x, const std::byte* gates, double* h, double* f, double* slope) {
    with_format(c.gate, [=, &c]<Format Z>() {
        auto own = gates_with_factors<Z>(c.function, gates);
        by_eights(c.n, [=, function = c.function](std::int64_t j, auto count) RMSNORM_BODY {
            D steep, factor = own.factors(function, j, count, steep);
            store<Format::f64>(h + j, load<Format::f64>(x + j, count) * factor, count);
            store<Format::f64>(f + j, factor, count);
            store<Format::f64>(slope + j, steep, count);
        });
    });
}

// dgate = n dy f'(z) of a row, and dy f(z) in place of dy.
[[gnu::noinline]] inline void gradients_beside_norm(
    const Call& c, const double* norm, const std::byte* gates, double* dy, std::byte* dgate) {
    with_format(c.gate, [=, &c]<Format Z>() {
        auto own = gates_with_factors<Z>(c.function, gates);
        by_eights(c.n, [=, function = c.function](std::int64_t j, auto count) RMSNORM_BODY {
            D steep, factor = own.factors(function, j, count, steep), v = load<Format::f64>(dy + j, count);
            D product = load<Format::f64>(norm + j, count) * v * steep;
            store<Z>(as<Stored<Z>>(dgate) + j, product + all_lanes(0.0), count);  // a zero becomes +0
            store<Format::f64>(dy + j, v * factor, count);
        });
    });
}

// The gains that y has, in `memory` if they are others: the backward pass has them before they are rounded.
inline const double* gains_of_y(const Call& c, const double* gain, double* memory) {
    if (c.norm == Format::none || c.offset == 0) return gain;
    by_eights(c.n, [=, &c](std::int64_t j, auto count) RMSNORM_BODY {
        store<Format::f64>(memory + j, rounded(load<Format::f64>(gain + j, count), c.product), count);
    });
    return memory;
}

// A row of a b f'(z), in the format of the gate.
[[gnu::noinline]] inline void store_gradient(
    Format format, const double* a, const double* b, const double* slope, std::byte* to, std::int64_t n) {
    with_format(format, [=]<Format Z>() {
        by_eights(n, [=](std::int64_t j, auto count) RMSNORM_BODY {
            D product = load<Format::f64>(a + j, count) * load<Format::f64>(b + j, count) * load<Format::f64>(slope + j, count);
            store<Z>(as<Stored<Z>>(to) + j, product + all_lanes(0.0), count);  // a zero becomes +0
        });
    });
}

}  // namespace rmsnorm::RMSNORM_LEVEL
