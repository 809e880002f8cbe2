// A row of dx whose terms cancel, computed again: in float64 where a bound shows that its bits are right, else in pairs.
//
//     dx = (u - c <u, h> / <c, c> + w c <u, h> / <c, c>) / rho,    u = (o + scale) dy
//
// with c what the statistic squares and w the share of eps in rho. The first difference is what cancels: it is 0 for
// n = 1, for u along c, and where only one element is not 0. What is below 2^-95 of its terms is 0, as in the golden.
#pragma once

#include "statistic.h"

namespace rmsnorm::RMSNORM_LEVEL {

// Numbers as unevaluated sums of two float64, value + error: 106 bits. Source: Dekker 1971; Knuth 1969.
struct Pair {
    double value = 0, error = 0;
};

inline double finite(double error) { return std::isfinite(error) ? error : 0.0; }

// a + b - total, exactly.
inline double sum_error(double a, double b, double total) {
    double t = total - a;
    return finite((a - (total - t)) + (b - t));
}

inline double product_error(double a, double b, double product) { return finite(std::fma(a, b, -product)); }

inline Pair normalised(double value, double error) {
    double total = value + error;
    return {total, finite(error - (total - value))};
}

inline Pair sum_of(Pair a, Pair b) {
    double total = a.value + b.value;
    return normalised(total, sum_error(a.value, b.value, total) + (a.error + b.error));
}

inline Pair minus(Pair a, Pair b) { return sum_of(a, {-b.value, -b.error}); }

inline Pair product_of(Pair a, Pair b) {
    double product = a.value * b.value;
    return normalised(product, finite(std::fma(a.value, b.value, -product) + (a.value * b.error + a.error * b.value)));
}

inline Pair over(Pair a, Pair b) {
    double quotient = a.value / b.value;
    double rest = std::fma(-quotient, b.value, a.value) + (a.error - quotient * b.error);
    return {quotient, finite(rest / b.value)};
}

// The row in float64, if every element is in the statistic. Returns whether its bits are right.
//
// For any number a near <u, h> / <h, h> the rest r = u - a h has an error of 2^-52 of itself, however small it is, and
//
//     u - h <u, h> / <h, h> = r - h <r, h> / <h, h>
//
// With g = (n / 8 + 8) 2^-53, the error of a sum in proportion to the sum of its sizes, 1 / rho has an error of g / 2,
// <h, h> and w have one of 2 g and g, and <r, h> one of g |r| |h|, by Cauchy and Schwarz. So an element is right up to
// 4 g (|r_j| + |h_j| (|r| / |h| + |w a|)) / rho. If both ends of that interval round to the same number, so does the
// exact result. The bound has 2^-45 |a| more, so that no difference passes that the golden takes for 0.
template <Format X, Format Y>
[[gnu::noinline, gnu::flatten]] bool refine(
    const Call& c, const Stored<X>* h, const Stored<Y>* dy, const Stored<X>* dh, const double* gain, double factor,
    double inner, Stored<X>* dx) {
    std::int64_t n = c.n;
    double rho = 1 / factor, size = static_cast<double>(n), share = 0, square = size * rho * rho;
    if (c.position == Position::inside) {
        share = c.eps * factor * factor;
        square = size * (rho * rho - c.eps);
    } else if (c.position == Position::outside) {
        share = c.eps * factor;
        square = size * (rho - c.eps) * (rho - c.eps);
    } else if (needs_length(c, factor)) {
        return false;
    }
    double along = inner * rho / square;
    if (c.k != n || !(share <= 0.5) || !std::isfinite(along)) return false;
    D near = all_lanes(-along);
    auto rest_of = [=](std::int64_t j, auto count) RMSNORM_BODY {
        D v = load<Y>(dy + j, count), g = load<Format::f64>(gain + j, count), u = v * g;
        D error = fma(v, g, all_lanes(0.0) - u);
        return fma(near, load<X>(h + j, count), u) + error;
    };
    struct Sums {
        D beside{}, rests{};
    };
    auto add = [=](Sums sums, std::int64_t j, auto count) RMSNORM_BODY {
        D rest = rest_of(j, count);
        return Sums{fma(rest, load<X>(h + j, count), sums.beside), fma(rest, rest, sums.rests)};
    };
    Sums sums;
    std::int64_t j = 0;
    for (; j + lanes <= n; j += lanes) sums = add(sums, j, Eight{});
    if (j < n) sums = call_once(add, sums, j, static_cast<int>(n - j));
    double beside = sum_of_lanes(sums.beside), rests = sum_of_lanes(sums.rests);
    double noise = 4 * (size / 8 + 8) * 0x1p-53 * factor, of_eps = share * along;
    D f = all_lanes(factor), more = all_lanes(of_eps - beside / square), zero = all_lanes(0.0), of_rest = all_lanes(noise);
    D of_h = all_lanes(noise * (std::sqrt(rests / square) + std::fabs(of_eps) + 0x1p-45 * std::fabs(along)));
    return !any_of_eights(n, [=](Marked marks, std::int64_t j, auto count) RMSNORM_BODY {
        D rest = rest_of(j, count), x = load<X>(h + j, count);
        D gradient = fma(f, fma(more, x, rest), zero), error = fma(magnitude(rest), of_rest, magnitude(x) * of_h);
        if (dh) {
            gradient = gradient + load<X>(dh + j, count) + zero;
            error = fma(magnitude(gradient), all_lanes(0x1p-51), error);
        }
        store<X>(dx + j, gradient, count);
        return marked(marks, is_split<X>(gradient, error));
    });
}

// A row of dx, in pairs.
template <Format X, Format Y>
[[gnu::noinline]] void settle(
    const Call& c, const Stored<X>* h, const Stored<Y>* dy, const Stored<X>* dh, const double* gain, Stored<X>* dx) {
    auto product = [=](std::int64_t j) {  // u, exactly
        double v = number<Y>(dy[j]), u = v * gain[j];
        return Pair{u, product_error(v, gain[j], u)};
    };
    Pair inner, square;
    for (std::int64_t j = 0; j < c.n; ++j) {
        Pair own{number<X>(h[j]), 0};
        inner = sum_of(inner, product_of(product(j), own));
        if (j < c.k) square = sum_of(square, product_of(own, own));
    }
    double rho = rho_of(c, square.value / static_cast<double>(c.k)), share = 0;
    if (c.position == Position::inside) {
        share = c.eps / (rho * rho);
    } else if (c.position == Position::outside) {
        share = c.eps / rho;
    } else if (is_clamped(square.value, c.eps) || rho == 0) {
        share = rho > 0 ? 1.0 : std::nan("");
    }
    Pair along{std::isfinite(inner.value) ? 0.0 : std::nan(""), 0};
    if (square.value > 0) along = over(inner, square);
    auto rest_of = [=](std::int64_t j) {
        Pair u = product(j);
        if (j >= c.k) return u.value;
        Pair near = product_of({number<X>(h[j]), 0}, along);
        bool whole = share <= 0.5 && std::isfinite(near.value);
        if (!whole) near = {near.value * (1 - share), near.error * (1 - share)};
        double rest = minus(u, near).value;
        if (!whole) return rest;
        return (std::fabs(rest) <= 0x1p-95 * std::fabs(near.value) ? 0 : rest) + share * near.value;
    };
    for (std::int64_t j = 0; j < c.n; ++j) {
        double gradient = rest_of(j) / rho;
        store_first<X>(dx + j, all_lanes((dh ? gradient + number<X>(dh[j]) : gradient) + 0.0), 1);
    }
}

}  // namespace rmsnorm::RMSNORM_LEVEL
