// Rows without a mask, whose statistic is the mean square of their first k elements, with a gate after the norm or without one.
#pragma once

#include "backward.h"
#include "gated.h"

namespace rmsnorm::RMSNORM_LEVEL {

// Rows are taken by up to eight: so the roots and
// divisions of some narrow rows are computed at once.
template <Format X, Format Y>
bool forward_plain(const Call& c, const Forward& a, const double* parameters, std::int64_t first, std::int64_t last) {
    constexpr std::int64_t most = 8;
    Groups groups(c, parameters, a.bias != nullptr, nullptr);
    Rows norm = a.gate ? new_rows(c, 1) : nullptr;
    if (!groups.has_memory() || (a.gate && !norm)) return false;
    std::int64_t n = c.n, many = std::clamp<std::int64_t>(2048 / n, 1, most);
    for (std::int64_t start = first * c.groups; start < last * c.groups; start += many) {
        std::int64_t count = std::min(many, last * c.groups - start);
        const Stored<X>* rows[most];
        double rho[most];
        for (std::int64_t b = 0; b < count; ++b) {
            std::int64_t i = start + b;
            rows[b] = as<Stored<X>>(a.x + place(c, i, a.x_step, n * size_of(X)));
            if (a.residual) {
                Stored<X>* h = as<Stored<X>>(a.h) + i * n;
                add_rows<X>(rows[b], as<Stored<X>>(a.residual) + i * n, h, n);
                rows[b] = h;
            }
            rho[b] = sum_of_squares<X>(rows[b], c.k) / static_cast<double>(c.k);
        }
        for (std::int64_t b = 0; b < count; ++b) rho[b] = rho_of(c, rho[b], c.k);
        for (std::int64_t b = 0; b < count && a.inverse_rms; ++b) a.inverse_rms[start + b] = 1 / rho[b];
        for (std::int64_t b = 0; b < count && a.y; ++b) {
            std::int64_t i = start + b;
            Stored<Y>* y = as<Stored<Y>>(a.y) + i * n;
            if (a.gate) {
                const std::byte* gate = a.gate + place(c, i, a.gate_step, n * size_of(c.gate));
                row_of_gated_y<X, Y>(c, groups.at(i), groups.are_moderate(), rows[b], rho[b], gate, norm.get(), y);
            } else {
                row_of_y<X, Y>(c, groups.at(i), groups.are_moderate(), rows[b], rho[b], y);
            }
        }
    }
    return true;
}

// Y is the format of dy; with a gate that of the norm's own.
template <Format X, Format Y>
bool backward_plain(
    const Call& c, const Backward& a, const double* parameters, double* sums, std::int64_t first, std::int64_t last) {
    Groups groups(c, parameters, a.gate && a.bias, sums);
    Rows memory = a.gate ? new_rows(c, 3) : nullptr;
    if (!groups.has_memory() || (a.gate && !memory)) return false;
    std::int64_t n = c.n, k = c.k;
    std::fill_n(sums, a.dbias ? 2 * c.features : c.features, 0.0);
    bool succeeds = true;
    for (std::int64_t i = first * c.groups; i < last * c.groups; ++i) {
        const Stored<X>* h = as<Stored<X>>(a.h + place(c, i, a.h_step, n * size_of(X)));
        const Stored<X>* dh = a.dh ? as<Stored<X>>(a.dh) + i * n : nullptr;
        Stored<X>* dx = a.dx ? as<Stored<X>>(a.dx) + i * n : nullptr;
        const Group& group = groups.at(i);
        const double* gain = group.gain;
        double *dscale = group.dscale, *dbias = group.dbias;
        double rho = a.inverse_rms && !a.gate ? 0 : rho_of(c, sum_of_squares<X>(h, k) / static_cast<double>(k), k);
        double factor = a.inverse_rms ? a.inverse_rms[i] : 1 / rho;
        const Stored<Y>* dy = as<Stored<Y>>(a.dy) + i * n;
        if constexpr (Y == Format::f64) {
            if (a.gate) {
                double *norm = memory.get(), *own = norm + n;
                Quotient q(rho, true);
                if (a.dgate) fill<X, Y>(c, h, gain, group.bias, q, norm, 0, n);
                const std::byte* gate = a.gate + place(c, i, a.gate_step, n * size_of(c.gate));
                std::byte* dgate = a.dgate ? a.dgate + i * n * size_of(c.gate) : nullptr;
                gradients_of_gate(c, a.dy + i * n * size_of(c.y), gate, norm, own, own + n, dgate);
                dy = own;
            }
        }
        if (a.dbias) {
            by_eights(n, [=](std::int64_t j, auto count) {
                store<Format::f64>(dbias + j, load<Format::f64>(dbias + j, count) + load<Y>(dy + j, count), count);
            });
        }
        D f = all_lanes(factor);
        double inner = factor * sum_over(n, [=](D total, std::int64_t j, auto count) {
            D product = load<Y>(dy + j, count) * load<X>(h + j, count);  // is exact
            D sum = fma(product, f, load<Format::f64>(dscale + j, count));
            store<Format::f64>(dscale + j, sum, count);
            return fma(product, load<Format::f64>(gain + j, count), total);
        });
        double length = 0;
        if (c.position == Position::outside) {
            length = sum_over(k, [=](D total, std::int64_t j, auto count) {
                D v = load<X>(h + j, count) * f;
                return fma(v, v, total);
            });
        }
        double share = slope_of(c, k, factor, length) * inner / static_cast<double>(k), step = factor * share;
        groups.add(i, a.dbias);
        if (!dx) continue;
        bool again = is_along<X, Y>(h, dy, gain, step, k);
        bool single = X == Format::bf16 && Y == Format::bf16 && groups.are_moderate() && !dh && k == n &&
                      0x1p-20 < factor && factor < 0x1p20 && std::fabs(share) < 0x1p20;
        if constexpr (X == Format::bf16 && Y == Format::bf16) {
            if (single) again |= fill_gradient_single(h, dy, gain, group.single, factor, share, step, dx, n);
        }
        if (!single) {
            again |= fill_gradient<X, Y>(h, dy, dh, gain, factor, step, dx, 0, k);
            if (k < n) fill_gradient<X, Y>(nullptr, dy, dh, gain, factor, 0.0, dx, k, n);
        }
        if (again) succeeds &= settle<X, Y>(c, h, dy, dh, gain, nullptr, dx);
    }
    return succeeds;
}

}  // namespace rmsnorm::RMSNORM_LEVEL
