// Rows without a mask, whose statistic is the mean square of their first k elements, with a gate or without one.
#pragma once

#include "general.h"

namespace rmsnorm::RMSNORM_LEVEL {

// Rows are taken by up to eight: so the roots and divisions of some narrow rows are computed at once.
template <Format X, Format Y>
bool forward_plain(const Call& c, const Forward& a, const double* parameters, std::int64_t first, std::int64_t last) {
    constexpr std::int64_t most = 8;
    Groups groups(c, parameters, a.bias != nullptr, nullptr);
    std::int64_t n = c.n, many = std::clamp<std::int64_t>(2048 / n, 1, most);
    Rows memory = a.gate ? new_rows(c, many) : nullptr;  // of h with a gate before the norm, of n with one after it
    if (!groups.has_memory() || (a.gate && !memory)) return false;
    for (std::int64_t start = first * c.groups; start < last * c.groups; start += many) {
        std::int64_t count = std::min(many, last * c.groups - start);
        const Stored<X>* rows[most];
        double rho[most];
        bool may_have_left_range[most] = {};
        for (std::int64_t b = 0; b < count; ++b) {
            std::int64_t i = start + b;
            rows[b] = as<Stored<X>>(a.x + place(c, i, a.x_step, n * size_of(X)));
            if (a.residual) {
                Stored<X>* h = as<Stored<X>>(a.h) + i * n;
                add_rows<X>(rows[b], as<Stored<X>>(a.residual) + i * n, h, n);
                rows[b] = h;
            }
            if (c.gate_before) {
                double* h = memory.get() + b * n;
                multiply_by_gate<X>(c, rows[b], a.gate + place(c, i, a.gate_step, n * size_of(c.gate)), h);
                rho[b] = sum_of_squares<Format::f64>(h, c.k) / static_cast<double>(c.k);
                may_have_left_range[b] = may_have_left(c, rho[b]);
            } else {
                rho[b] = sum_of_squares<X>(rows[b], c.k) / static_cast<double>(c.k);
            }
        }
        for (std::int64_t b = 0; b < count; ++b) rho[b] = rho_of(c, rho[b], c.k);
        for (std::int64_t b = 0; b < count && a.inverse_rms; ++b) a.inverse_rms[start + b] = 1 / rho[b];
        for (std::int64_t b = 0; b < count && a.y; ++b) {
            std::int64_t i = start + b;
            Stored<Y>* y = as<Stored<Y>>(a.y) + i * n;
            if (c.gate_before) {
                row_of_wide_h<Y>(c, groups.at(i), groups.are_moderate(), memory.get() + b * n, rho[b], y);
            } else if (a.gate) {
                const std::byte* gate = a.gate + place(c, i, a.gate_step, n * size_of(c.gate));
                row_of_gated_y<X, Y>(c, groups.at(i), groups.are_moderate(), rows[b], rho[b], gate, memory.get(), y);
            } else {
                row_of_y<X, Y>(c, groups.at(i), groups.are_moderate(), rows[b], rho[b], y);
            }
        }
        for (std::int64_t b = 0; b < count; ++b) {  // each alone: no bit of a row depends on its neighbours
            if (may_have_left_range[b] && !forward_general(c, a, parameters, start + b, start + b + 1)) return false;
        }
    }
    return true;
}

// A row of dx, which may be null, and what it adds to dscale and dbias of the group, which likewise may. `factor` is 1 / rho.
template <Format X, Format Y>
inline bool gradients_of_row(
    const Call& c, const Group& group, bool are_moderate, const Stored<X>* h, const Stored<Y>* dy, const Stored<X>* dh,
    double factor, Stored<X>* dx) {
    std::int64_t n = c.n, k = c.k;
    const double* gain = group.gain;
    double *dscale = group.dscale, *dbias = group.dbias;
    // Then no product is a NaN: a finite 1 / rho shows that h is finite, too. To the sums the row adds nothing.
    bool may_be_zero = number<Y>(dy[0]) == 0 && are_moderate && k == n && 0 < factor && factor < HUGE_VAL;
    if (may_be_zero && are_zeros<Y>(dy, n)) {
        if (dx) fill_zeros<X>(dh, dx, n);
        return true;
    }
    if (dbias) {
        by_eights(n, [=](std::int64_t j, auto count) RMSNORM_BODY {
            store<Format::f64>(dbias + j, load<Format::f64>(dbias + j, count) + load<Y>(dy + j, count), count);
        });
    }
    if (!dx && !dscale) return true;
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
    if (!dx) return true;
    double length = 0;
    if (needs_length(c, k, factor)) {
        length = sum_over(k, [=](D total, std::int64_t j, auto count) RMSNORM_BODY {
            D v = load<X>(h + j, count) * f;
            return fma(v, v, total);
        });
    }
    double share = slope_of(c, k, factor, length) * inner / static_cast<double>(k), step = factor * share;
    bool along = is_along<X, Y>(h, dy, gain, step, k), again = along;
    if constexpr (X != Format::f64) {
        if (along && refine<X, Y>(c, h, dy, dh, gain, factor, inner, dx)) return true;
    }
    bool single = false;
    if constexpr (is_short(X) && X == Y) {
        single = are_moderate && !dh && k == n && is_single_gradient<X>(factor, share);
        if (single) again |= fill_gradient_single<X>(h, dy, gain, group.single, factor, share, step, dx, n);
    }
    if (!single) {
        again |= fill_gradient<X, Y>(h, dy, dh, gain, factor, step, dx, 0, k);
        if (k < n) fill_gradient<X, Y>(nullptr, dy, dh, gain, factor, 0.0, dx, k, n);
    }
    if constexpr (X != Format::f64) {
        if (again && !along && refine<X, Y>(c, h, dy, dh, gain, factor, inner, dx)) return true;
    }
    return !again || settle<X, Y>(c, h, dy, dh, gain, nullptr, dx);
}

template <Format X, Format Y>
bool backward_plain(
    const Call& c, const Backward& a, const double* parameters, double* sums, std::int64_t first, std::int64_t last) {
    Groups groups(c, parameters, false, sums, a.dscale, a.dbias);
    if (!groups.has_memory()) return false;
    std::int64_t n = c.n;
    bool succeeds = true;
    for (std::int64_t i = first * c.groups; i < last * c.groups; ++i) {
        const Stored<X>* h = as<Stored<X>>(a.h + place(c, i, a.h_step, n * size_of(X)));
        const Stored<X>* dh = a.dh ? as<Stored<X>>(a.dh) + i * n : nullptr;
        Stored<X>* dx = a.dx ? as<Stored<X>>(a.dx) + i * n : nullptr;
        const Group& group = groups.at(i);
        double factor = a.inverse_rms ? a.inverse_rms[i]
                                      : 1 / rho_of(c, sum_of_squares<X>(h, c.k) / static_cast<double>(c.k), c.k);
        succeeds &= gradients_of_row<X, Y>(
            c, group, groups.are_moderate(), h, as<Stored<Y>>(a.dy) + i * n, dh, factor, dx);
        groups.add(i);
    }
    return succeeds;
}

// y of a row before its gate, as the variant rounds it. `x` is `row` in float64, `gains` has room for a row.
inline void norm_of_row(
    const Call& c, const Group& group, bool are_moderate, const std::byte* row, const double* x, double rho, double* gains,
    double* norm) {
    auto by_singles = [&]<Format X>() {
        Stored<X>* y = reinterpret_cast<Stored<X>*>(gains);
        row_of_y<X, X>(c, group, are_moderate, as<Stored<X>>(row), rho, y);
        load_any(X, reinterpret_cast<const std::byte*>(y), norm, c.n);
    };
    bool is_rounded = c.norm != Format::none && c.product == c.x && c.y == c.x && c.offset == 0;
    if (is_rounded && c.x == Format::bf16) return by_singles.template operator()<Format::bf16>();
    if (is_rounded && c.x == Format::f16) return by_singles.template operator()<Format::f16>();
    constexpr Format W = Format::f64;
    fill<W, W>(c, x, gains_of_y(c, group.gain, gains), group.bias, Quotient(rho, true), norm, 0, c.n);
}

// The same with a gate. A row is read to float64 once.
inline bool backward_gated(
    const Call& c, const Backward& a, const double* parameters, double* sums, std::int64_t first, std::int64_t last) {
    constexpr Format W = Format::f64;
    Groups groups(c, parameters, a.bias != nullptr, sums, a.dscale, a.dbias);
    Rows memory = new_rows(c, 6);
    if (!groups.has_memory() || !memory) return false;
    std::int64_t n = c.n, x_bytes = n * size_of(c.x), gate_bytes = n * size_of(c.gate);
    double *x = memory.get(), *v = x + n, *f = v + n, *slope = f + n, *other = slope + n, *dx = other + n;
    bool needs_dx = a.dx || (a.dgate && c.gate_before), succeeds = true;
    for (std::int64_t i = first * c.groups; i < last * c.groups; ++i) {
        const Group& group = groups.at(i);
        const std::byte* row = a.h + place(c, i, a.h_step, x_bytes);
        load_any(c.x, row, x, n);
        load_any(c.y, a.dy + i * n * size_of(c.y), v, n);
        const std::byte* gate = a.gate + place(c, i, a.gate_step, gate_bytes);
        double* h = x;
        if (c.gate_before) {
            h = other;
            multiply_by_factors(c, x, gate, h, f, slope);
        }
        double q = sum_of_squares<W>(h, c.k) / static_cast<double>(c.k), rho = rho_of(c, q, c.k);
        if (c.gate_before && may_have_left(c, q)) {
            succeeds &= backward_general(c, a, parameters, sums, i, i + 1);
            continue;
        }
        std::byte* dgate = a.dgate ? a.dgate + i * gate_bytes : nullptr;
        if (!c.gate_before && dgate) {
            norm_of_row(c, group, groups.are_moderate(), row, x, rho, slope, other);
            gradients_beside_norm(c, other, gate, v, dgate);
        } else if (!c.gate_before) {
            factors(c, gate, f, nullptr);
            for (std::int64_t j = 0; j < n; ++j) v[j] *= f[j];
        }
        succeeds &= gradients_of_row<W, W>(c, group, groups.are_moderate(), h, v, nullptr, 1 / rho, needs_dx ? dx : nullptr);
        groups.add(i);
        if (c.gate_before && dgate) store_gradient(c.gate, dx, x, slope, dgate, n);
        if (a.dx) store_dx(c, a, i, dx, c.gate_before ? f : nullptr);
    }
    return succeeds;
}

}  // namespace rmsnorm::RMSNORM_LEVEL
