// Gated rows whose elements all count.
//
//     after:   y = n f(z),           dz = dy n f'(z),     n = h / rho * (o + scale) + bias, which gets dy f(z) for its dy
//     before:  h = x f(z),           dz = dh x f'(z),     dx = dh f(z)
#pragma once

#include "forward.h"
#include "gate.h"
#include "row.h"

namespace rmsnorm::RMSNORM_LEVEL {

// A row of y in bfloat16, multiplied by f(z), in float32 arithmetic; see single.h.
template <Format X, Format Z, bool BEFORE>
inline void fill_gated(
    const Call& c, const Stored<X>* h, const double* gain, const float* gain32, Quotient q, const Stored<Z>* z,
    std::uint16_t* y) {
    Float inverse = all_singles(static_cast<float>(1 / q.rho));
    bool cuts = BEFORE && c.product == Format::bf16;
    auto again = [=, &c](std::int64_t from, std::int64_t to) RMSNORM_RARE {
        double exact[singles];
        fill<X, Format::f64>(c, h + from, gain + from, nullptr, q, exact, 0, to - from);
        by_eights(to - from, [=, &c, &exact](std::int64_t j, auto count) {
            D v = load<Format::f64>(exact + j, count) * factor(c.function, load<Z>(z + from + j, count));
            store<Format::bf16>(y + from + j, v, count);
        });
    };
    auto compute = [=, &c](std::int64_t j) {
        Float g, gate = load_singles<Z>(z + j), v = load_singles<X>(h + j) * inverse;
        std::memcpy(&g, gain32 + j, sizeof g);
        Word doubt = ~(magnitude(gate) <= single_gate);
        if constexpr (BEFORE) {
            doubt |= is_near(v, gated_units) | is_tiny_or_zero(v);
            v = to_bf16(v);
        }
        v *= g;
        if (cuts) v = to_bf16(v);
        v *= factor(c.function, gate);
        store_singles<Format::bf16>(y + j, v);
        if (any(doubt | is_near(v, gated_units) | is_tiny_or_zero(v))) [[unlikely]] again(j, j + singles);
    };
    by_registers(c.n, compute, again);
}

// A row of n f(z).
template <Format Y>
[[gnu::noinline]] void fill_product(const Call& c, const double* norm, const std::byte* gates, Stored<Y>* y) {
    with_format(c.gate, [=, &c]<Format Z>() {
        const Stored<Z>* z = as<Stored<Z>>(gates);
        by_eights(c.n, [=, &c](std::int64_t j, auto count) {
            store<Y>(y + j, gated(c.function, load<Format::f64>(norm + j, count), load<Z>(z + j, count)), count);
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
        const Stored<Z>* z = as<Stored<Z>>(gates);
        by_eights(c.n, [=, &c](std::int64_t j, auto count) {
            store<Format::f64>(h + j, gated(c.function, load<X>(x + j, count), load<Z>(z + j, count)), count);
        });
    });
}

// f(z) and, if `slope` is not null, f'(z) of a row. A loop of its own: the constants of the exponential fill the registers.
[[gnu::noinline]] inline void factors(const Call& c, const std::byte* gates, double* f, double* slope) {
    with_format(c.gate, [=, &c]<Format Z>() {
        const Stored<Z>* z = as<Stored<Z>>(gates);
        by_eights(c.n, [=, &c](std::int64_t j, auto count) {
            D steep;
            store<Format::f64>(f + j, factor(c.function, load<Z>(z + j, count), slope ? &steep : nullptr), count);
            if (slope) store<Format::f64>(slope + j, steep, count);
        });
    });
}

// The gains that y has, in `memory` if they are others: the backward pass has them before they are rounded.
inline const double* gains_of_y(const Call& c, const double* gain, double* memory) {
    if (c.norm == Format::none || c.offset == 0) return gain;
    by_eights(c.n, [=, &c](std::int64_t j, auto count) {
        store<Format::f64>(memory + j, rounded(load<Format::f64>(gain + j, count), c.product), count);
    });
    return memory;
}

// A row of a b f'(z), in the format of the gate.
[[gnu::noinline]] inline void store_gradient(
    Format format, const double* a, const double* b, const double* slope, std::byte* to, std::int64_t n) {
    with_format(format, [=]<Format Z>() {
        by_eights(n, [=](std::int64_t j, auto count) {
            D product = load<Format::f64>(a + j, count) * load<Format::f64>(b + j, count) * load<Format::f64>(slope + j, count);
            store<Z>(as<Stored<Z>>(to) + j, product + all_lanes(0.0), count);  // a zero becomes +0
        });
    });
}

}  // namespace rmsnorm::RMSNORM_LEVEL
