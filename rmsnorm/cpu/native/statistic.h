// A row and its statistic rho.
#pragma once

#include "formats.h"

namespace rmsnorm::RMSNORM_LEVEL {

// A count that the compiler knows: eight elements.
struct Eight {
    constexpr operator int() const { return lanes; }
};

// Calls the body of a loop for what the loop leaves: the last elements, or one more eight of a sum.
//
// It gets a copy: what the loop's own body captured would stay in memory, inside the loop too, if its address were known.
template <class Body, class... Arguments>
[[gnu::noinline]] auto call_once(Body body, Arguments... arguments) {
    return body(arguments...);
}

// Calls body(j, count) for each eight elements of n, and for the rest, with how many there are. The loop has the body in it.
template <class Body>
[[gnu::flatten]] RMSNORM_INLINE void by_eights(std::int64_t n, Body body) {
    std::int64_t j = 0;
    for (; j + lanes <= n; j += lanes) body(j, Eight{});
    if (j < n) call_once(body, j, static_cast<int>(n - j));
}

RMSNORM_INLINE Marked marked(Marked a, Marked b) {
    for (int i = 0; i < parts; ++i) a.part[i] |= b.part[i];
    return a;
}

// The same, with marks of the eight lanes that every body(marks, j, count) gets from the one before it, and returns.
template <class Body>
[[gnu::flatten]] RMSNORM_INLINE bool any_of_eights(std::int64_t n, Body body) {
    Marked marks{};
    std::int64_t j = 0;
    for (; j + lanes <= n; j += lanes) marks = body(marks, j, Eight{});
    if (j < n) marks = call_once(body, marks, j, static_cast<int>(n - j));
    for (int i = 1; i < parts; ++i) marks.part[0] |= marks.part[i];
    return any(marks.part[0]);
}

// Eight numbers, or the first ones of a row's end and zeros.
template <Format F>
RMSNORM_INLINE D load(const Stored<F>* from, Eight) { return load<F>(from); }
template <Format F>
RMSNORM_INLINE D load(const Stored<F>* from, int count) {
    return count == lanes ? load<F>(from) : load_first<F>(from, count);
}

// Eight products, which are exact: of float16 they are numbers of float32.
template <Format X, Format Y, class Count>
RMSNORM_INLINE D exact_product(const Stored<X>* x, const Stored<Y>* y, Count count) {
    if constexpr (X == Format::f16 && Y == Format::f16 && std::is_same_v<Count, Eight>) {
        HalfPart a[parts], b[parts];
        load_narrow<X>(a, x);
        load_narrow<Y>(b, y);
        for (int i = 0; i < parts; ++i) a[i] *= b[i];
        return widened(a);
    } else {
        return load<X>(x, count) * load<Y>(y, count);
    }
}

template <Format F>
RMSNORM_INLINE void store(Stored<F>* to, const D& d, Eight) { store<F>(to, d); }
template <Format F>
RMSNORM_INLINE void store(Stored<F>* to, const D& d, int count) {
    count == lanes ? store<F>(to, d) : store_first<F>(to, d, count);
}

// The sum over a row of what body(sum of a lane, j, count) adds; element j is in lane j % 8 of total j / 8 % 4.
template <class Body>
[[gnu::flatten]] RMSNORM_INLINE double sum_over(std::int64_t n, Body body) {
    D a{}, b{}, c{}, d{};  // and not an array, so that they stay in registers
    std::int64_t j = 0;
    for (; j + 4 * lanes <= n; j += 4 * lanes) {
        a = body(a, j, Eight{});
        b = body(b, j + lanes, Eight{});
        c = body(c, j + 2 * lanes, Eight{});
        d = body(d, j + 3 * lanes, Eight{});
    }
    Sum sum{{a, b, c, d}};
    for (int i = 0; j + lanes <= n; j += lanes, ++i) sum.total[i] = call_once(body, sum.total[i], j, Eight{});
    if (j < n) {
        int i = static_cast<int>(j / lanes % 4);
        sum.total[i] = call_once(body, sum.total[i], j, static_cast<int>(n - j));
    }
    return sum.value();
}

template <Format X>
[[gnu::noinline]] double sum_of_squares(const Stored<X>* h, std::int64_t k) {
    return sum_over(k, [=](D total, std::int64_t j, auto count) RMSNORM_BODY {
        D v = load<X>(h + j, count);
        return fma(v, v, total);
    });
}

// rho of the mean square.
inline double rho_of(const Call& c, double q) {
    if (c.position == Position::inside) return std::sqrt(q + c.eps);
    if (c.position == Position::outside) return std::sqrt(q) + c.eps;
    double root = std::sqrt(q), floor = c.eps / std::sqrt(static_cast<double>(c.k));
    return root < floor ? floor : root;
}

// Whether `slope_of` needs the squared length of h / rho: for eps outside, and in rows next to a clamp.
inline bool needs_length(const Call& c, double inverse_rms) {
    if (c.position != Position::clamp) return c.position == Position::outside;
    return inverse_rms * c.eps > 0.5 * std::sqrt(static_cast<double>(c.k));
}

// Whether a row of this squared length is clamped. A row whose length is eps, up to rounding, is not (CLAMPED in Python).
inline bool is_clamped(double square, double eps) { return square < eps * eps * (1 - 0x1p-47); }

// rho / s, with drho / dh = h / (k s): 1 for eps inside, rho / (rho - eps) outside, 1 or 0 for a clamp.
//
// For eps outside it comes from `length`, the squared length of h / rho: rho - eps is the root of the mean square.
inline double slope_of(const Call& c, double inverse_rms, double length) {
    double size = static_cast<double>(c.k);
    if (c.position == Position::outside) return length / size > 0 ? 1 / std::sqrt(length / size) : 0.0;
    bool is_constant = needs_length(c, inverse_rms) && is_clamped(length, inverse_rms * c.eps);
    return is_constant ? 0.0 : 1.0;
}

// Where the i-th group begins, in bytes. A step leads from a row to the next, and a group has `bytes`.
inline std::int64_t place(const Call& c, std::int64_t i, std::int64_t step, std::int64_t bytes) {
    return c.groups == 1 ? i * step : i / c.groups * step + i % c.groups * bytes;
}

inline std::int64_t group_of(const Call& c, std::int64_t i) { return c.groups == 1 ? 0 : i % c.groups; }

}  // namespace rmsnorm::RMSNORM_LEVEL
