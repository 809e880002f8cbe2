// The backward pass on rows in memory: float64 inside, each gradient rounded once.
//
//     dx = (u - h / s <u, h / rho> / k) / rho + dh,    u = (o + scale) dy,    dscale = sum of dy h / rho,    dbias = sum of dy
//
// with drho / dh = h / (k s). Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
#pragma once

#include "cancelled.h"
#include "parameters.h"
#include "single.h"

namespace rmsnorm::RMSNORM_LEVEL {

// Two kinds of rows are computed again in pairs. In the first, u is parallel to h: the first elements of the row that
// are not 0 show it. In the second, the terms of an element cancel, so that its last bits could be wrong; random rows
// rarely do that.
constexpr int sample = 16;
constexpr double is_parallel = 0x1p-8, cancels_below = 0x1p-24;

// In 2^-24 of the terms: h / rho and its factor, three products and a difference, 1 / rho, the ends of the interval.
constexpr float backward_units = 12 * 0x1p-24f;
// The same for float16, where so many elements are in doubt that each unit counts. A term has the roundings of a factor and of
// a product, the difference has one, the product with 1 / rho two, an end one. The tenth is for products of errors. If the
// exact result is 0, or next to nothing beside its terms, the ends have two signs, and so are not equal.
constexpr double half_backward_units = 6.1 * 0x1p-24;

// Elements `from` to `to` of a row of dx. Returns whether one of them is a small difference of large terms.
template <Format X, Format Y>
inline bool fill_gradient(
    const Stored<X>* h, const Stored<Y>* dy, const Stored<X>* dh, const double* gain, double factor, double step,
    Stored<X>* dx, std::int64_t from, std::int64_t to) {
    D f = all_lanes(factor), s = all_lanes(step), zero = all_lanes(0.0);
    return any_of_eights(to - from, [=](Marked marks, std::int64_t j, auto count) RMSNORM_BODY {
        j += from;
        D near = h ? load<X>(h + j, count) * s : zero;  // null: of elements that are not in the statistic
        D rest = fma(load<Y>(dy + j, count), load<Format::f64>(gain + j, count), zero - near);
        D gradient = fma(f, rest, zero);  // a zero becomes +0
        if (dh) gradient = gradient + load<X>(dh + j, count) + zero;
        store<X>(dx + j, gradient, count);
        D small = magnitude(rest), large = all_lanes(cancels_below) * magnitude(near);
        for (int i = 0; i < parts; ++i) marks.part[i] |= small.part[i] < large.part[i];
        return marks;
    });
}

// Whether a row of dx in a format of 16 bits may be computed in float32 arithmetic; see single.h.
template <Format F>
inline bool is_single_gradient(double factor, double share) {
    double size = std::fabs(share);
    // The least number of float16 is 2^-24. So its terms are 0 or above 2^-104, and none is out of range.
    if (F == Format::f16 && 0 < size && size < 0x1p-40) return false;
    return 0x1p-20 < factor && factor < 0x1p20 && size < 0x1p20;
}

// dx = (dy gain - h / rho share) / rho in float32 arithmetic, from 16 bits to 16 bits of the same format.
template <Format F>
inline bool fill_gradient_single(
    const std::uint16_t* h, const std::uint16_t* dy, const double* gain, const float* gain32, double factor,
    double share, double step, std::uint16_t* dx, std::int64_t n) {
    Float inverse = all_singles(static_cast<float>(factor));
    bool cancels = false;
    auto again = [=, &cancels](std::int64_t from, std::int64_t to) {
        cancels |= fill_gradient<F, F>(h, dy, nullptr, gain, factor, step, dx, from, to);
    };
    Float along = all_singles(static_cast<float>(step)), bound = all_singles(static_cast<float>(factor * half_backward_units));
    auto compute_f16 = [=](std::int64_t j) RMSNORM_BODY {
        Float g;
        std::memcpy(&g, gain32 + j, sizeof g);
        Float first = load_singles<F>(dy + j) * g, second = load_singles<F>(h + j) * along;
        Float gradient = fma(inverse, first - second, Float{}), size = magnitude(first) + magnitude(second);  // a zero is +0
        Ends ends(fma(-bound, size, gradient), fma(bound, size, gradient));
        std::memcpy(dx + j, &ends.one, sizeof ends.one);
        if (any(ends.differ())) [[unlikely]] call_rarely(again, j, j + singles);
    };
    Float part = all_singles(static_cast<float>(share)), units = all_singles(backward_units);
    Word none = all_singles(share == 0) != 0.0f;
    auto compute_bf16 = [=](std::int64_t j) RMSNORM_BODY {
        Float g;
        std::memcpy(&g, gain32 + j, sizeof g);
        Float dy_j = load_singles<F>(dy + j), h_j = load_singles<F>(h + j);
        Float first = dy_j * g, second = (h_j * inverse) * part;
        Float gradient = inverse * (first - second), size = inverse * (magnitude(first) + magnitude(second));
        store_singles<F>(dx + j, gradient + Float{});  // a zero becomes +0
        Word doubt = is_split(gradient, size * units) | is_far_out(size);
        if (any(doubt)) [[unlikely]] {  // of zeros there is none: no product underflowed
            Word zero = ((dy_j == 0.0f) | (g == 0.0f)) & ((h_j == 0.0f) | none);
            if (any(doubt & ~zero)) call_rarely(again, j, j + singles);
        }
    };
    if constexpr (F == Format::f16) {
        by_registers(n, compute_f16, again);
    } else {
        by_registers(n, compute_bf16, again);
    }
    return cancels;
}

// Whether all numbers are 0, of either sign.
template <Format Y>
[[gnu::noinline, gnu::flatten]] bool are_zeros(const Stored<Y>* dy, std::int64_t n) {
    auto has_other = [=](std::int64_t j, auto count) RMSNORM_BODY {
        D v = load<Y>(dy + j, count);
        Bits marks{};
        for (int i = 0; i < parts; ++i) marks |= v.part[i] != 0.0;
        return any(marks);
    };
    std::int64_t j = 0;
    for (; j + lanes <= n; j += lanes) {
        if (has_other(j, Eight{})) return false;
    }
    return j == n || !call_once(has_other, j, static_cast<int>(n - j));
}

// A row of dx where dy is 0.
template <Format X>
inline void fill_zeros(const Stored<X>* dh, Stored<X>* dx, std::int64_t n) {
    D zero = all_lanes(0.0);
    by_eights(n, [=](std::int64_t j, auto count) RMSNORM_BODY {
        store<X>(dx + j, dh ? load<X>(dh + j, count) + zero : zero, count);
    });
}

template <Format X, Format Y>
inline bool is_along(const Stored<X>* h, const Stored<Y>* dy, const double* gain, double step, std::int64_t k) {
    if (!(0 < std::fabs(step) && std::fabs(step) < HUGE_VAL)) return false;
    int sampled = 0;
    for (std::int64_t j = 0; j < k && sampled < sample; ++j) {
        double near = number<X>(h[j]) * step;
        if (!(std::fabs(number<Y>(dy[j]) * gain[j] - near) <= is_parallel * std::fabs(near))) return false;
        sampled += near != 0;
    }
    return sampled > 0;
}

template <Format Y>
inline void add_to_dbias(const Stored<Y>* dy, double* dbias, std::int64_t n) {
    by_eights(n, [=](std::int64_t j, auto count) RMSNORM_BODY {
        store<Format::f64>(dbias + j, load<Format::f64>(dbias + j, count) + load<Y>(dy + j, count), count);
    });
}

// A row of dx, which may be null, and what it adds to dscale and dbias of the group, which likewise may. `factor` is 1 / rho.
template <Format X, Format Y>
inline void gradients_of_row(
    const Call& c, const Group& group, bool are_moderate, const Stored<X>* h, const Stored<Y>* dy, const Stored<X>* dh,
    double factor, Stored<X>* dx) {
    std::int64_t n = c.n, k = c.k;
    const double* gain = group.gain;
    double *dscale = group.dscale, *dbias = group.dbias;
    // Then no product is a NaN: a finite 1 / rho shows that h is finite, too. To the sums the row adds nothing.
    bool may_be_zero = number<Y>(dy[0]) == 0 && are_moderate && k == n && 0 < factor && factor < HUGE_VAL;
    if (may_be_zero && are_zeros<Y>(dy, n)) {
        if (dx) fill_zeros<X>(dh, dx, n);
        return;
    }
    if (dbias) add_to_dbias<Y>(dy, dbias, n);
    if (!dx && !dscale) return;
    D f = all_lanes(factor);
    auto sum_of_products = [=](auto adds) RMSNORM_BODY {
        return sum_over(n, [=](D total, std::int64_t j, auto count) RMSNORM_BODY {
            D product = exact_product<X, Y>(h + j, dy + j, count);
            if constexpr (decltype(adds)::value) {
                store<Format::f64>(dscale + j, fma(product, f, load<Format::f64>(dscale + j, count)), count);
            }
            return fma(product, load<Format::f64>(gain + j, count), total);
        });
    };
    double inner = factor * (dscale ? sum_of_products(std::true_type{}) : sum_of_products(std::false_type{}));
    if (!dx) return;
    double length = 0;
    if (needs_length(c, factor)) {
        length = sum_over(k, [=](D total, std::int64_t j, auto count) RMSNORM_BODY {
            D v = load<X>(h + j, count) * f;
            return fma(v, v, total);
        });
    }
    double share = slope_of(c, factor, length) * inner / static_cast<double>(k), step = factor * share;
    bool along = is_along<X, Y>(h, dy, gain, step, k), again = along;
    if (along && refine<X, Y>(c, h, dy, dh, gain, factor, inner, dx)) return;
    bool single = false;
    if constexpr (is_short(X) && X == Y) {
        single = are_moderate && !dh && k == n && is_single_gradient<X>(factor, share);
        if (single) again |= fill_gradient_single<X>(h, dy, gain, group.single, factor, share, step, dx, n);
    }
    if (!single) {
        again |= fill_gradient<X, Y>(h, dy, dh, gain, factor, step, dx, 0, k);
        if (k < n) fill_gradient<X, Y>(nullptr, dy, dh, gain, factor, 0.0, dx, k, n);
    }
    if (again && !along && refine<X, Y>(c, h, dy, dh, gain, factor, inner, dx)) return;
    if (again) settle<X, Y>(c, h, dy, dh, gain, dx);
}

template <Format X, Format Y>
void backward_rows(
    const Call& c, const Backward& a, const double* parameters, double* sums, std::int64_t first, std::int64_t last) {
    Parameters own{c, parameters, sums, a.dscale != nullptr, a.dbias != nullptr};
    std::int64_t n = c.n;
    for (std::int64_t i = first * c.groups; i < last * c.groups; ++i) {
        const Stored<X>* h = as<Stored<X>>(a.h + place(c, i, a.h_step, n * size_of(X)));
        const Stored<X>* dh = a.dh ? as<Stored<X>>(a.dh) + i * n : nullptr;
        Stored<X>* dx = a.dx ? as<Stored<X>>(a.dx) + i * n : nullptr;
        double factor = a.inverse_rms ? a.inverse_rms[i]
                                      : 1 / rho_of(c, sum_of_squares<X>(h, c.k) / static_cast<double>(c.k));
        if (a.found) a.found[i] = factor;
        gradients_of_row<X, Y>(c, own.of_group(i), own.are_moderate(), h, as<Stored<Y>>(a.dy) + i * n, dh, factor, dx);
    }
}

template <Format X, Format Y>
[[gnu::noinline]] void add_to_dscale(
    const Stored<X>* h, const Stored<Y>* dy, double factor, double* dscale, std::int64_t n) {
    by_eights(n, [=](std::int64_t j, auto count) RMSNORM_BODY {
        D product = exact_product<X, Y>(h + j, dy + j, count), f = all_lanes(factor);
        store<Format::f64>(dscale + j, fma(product, f, load<Format::f64>(dscale + j, count)), count);
    });
}

// Adds in the order in which `backward_rows` does, so that the bits are the same.
template <Format X, Format Y>
void sum_columns(const Call& c, const Backward& a, double* sums, std::int64_t from, std::int64_t to) {
    for (std::int64_t i = 0; i < c.rows * c.groups; ++i) {
        std::int64_t row = i / c.groups, start = group_of(c, i) * c.n, first = std::max(from, start);
        std::int64_t n = std::min(to, start + c.n) - first;
        if (n <= 0) continue;
        const Stored<X>* h = as<Stored<X>>(a.h + row * a.h_step) + first;
        const Stored<Y>* dy = as<Stored<Y>>(a.dy) + row * c.width() + first;
        if (a.dscale) add_to_dscale<X, Y>(h, dy, a.inverse_rms[i], sums + first, n);
        if (a.dbias) add_to_dbias<Y>(dy, sums + c.width() + first, n);
    }
}

inline void finish(const Call& c, const Backward& a, double* sums, std::int64_t count) {
    for (int which = 0; which < 2; ++which) {
        std::byte* to = which ? a.dbias : a.dscale;
        if (!to) continue;
        double* total = sums + which * c.width();
        for (std::int64_t i = 1; i < count; ++i) {
            const double* more = total + 2 * i * c.width();
            for (std::int64_t j = 0; j < c.width(); ++j) total[j] += more[j];
        }
        with_format(which ? c.bias : c.scale, [=, &c]<Format F>() { store_row<F>(as<Stored<F>>(to), total, c.width()); });
    }
}

}  // namespace rmsnorm::RMSNORM_LEVEL
