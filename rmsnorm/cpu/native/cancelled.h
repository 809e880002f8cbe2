// A row of dx whose terms cancel, computed again in pairs of float64.
//
//     dx = (u - c <u, h> / <c, c> + w c <u, h> / <c, c>) / rho,    u = (o + scale) dy
//
// with c what the statistic squares and w the share of eps in rho. The first difference is what cancels: it is 0 for
// n = 1, for u along c, and where only one element is not 0. What is below 2^-95 of its terms is 0, as in the golden.
#pragma once

#include "pairs.h"
#include "statistic.h"

namespace rmsnorm::RMSNORM_LEVEL {

// Writes dx, without dh, in place of dy, `v`. `used` says which elements are in the statistic, `counts` which are under
// no mask; both are null where all of the first k, and all, are.
inline void cancelled(
    const Call& c, const double* h, double* v, const double* gain, const std::uint8_t* counts) {
    std::int64_t n = c.n, k = 0;
    for (std::int64_t j = 0; j < c.k; ++j) k += !counts || counts[j];
    double size = static_cast<double>(k ? k : 1);
    Pair mean;
    if (c.variance) {
        for (std::int64_t j = 0; j < c.k; ++j) {
            if (!counts || counts[j]) mean = sum_of(mean, {h[j], 0});
        }
        mean = over(mean, {size, 0});
    }
    auto centred = [&](std::int64_t j) { return c.variance ? minus({h[j], 0}, mean) : Pair{h[j], 0}; };
    Pair inner, square;
    for (std::int64_t j = 0; j < n; ++j) {
        if (counts && !counts[j]) continue;
        double u = v[j] * gain[j];
        inner = sum_of(inner, product_of({u, product_error(v[j], gain[j], u)}, {h[j], 0}));
        if (j < c.k) square = sum_of(square, product_of(centred(j), centred(j)));
    }
    double rho = rho_of(c, square.value / size, k), share = 0;
    if (c.position == Position::inside) {
        share = c.eps / (rho * rho);
    } else if (c.position == Position::outside) {
        share = c.eps / rho;
    } else if (is_clamped(square.value, c.eps) || rho == 0) {
        share = rho > 0 ? 1.0 : std::nan("");
    }
    Pair along{std::isfinite(inner.value) ? 0.0 : std::nan(""), 0};
    if (square.value > 0) along = over(inner, square);
    for (std::int64_t j = 0; j < n; ++j) {
        if (counts && !counts[j]) {
            v[j] = 0;
            continue;
        }
        double u = v[j] * gain[j], rest = u;
        if (j < c.k) {
            Pair near = product_of(centred(j), along);
            bool whole = share <= 0.5 && std::isfinite(near.value);
            if (!whole) near = {near.value * (1 - share), near.error * (1 - share)};
            rest = minus({u, product_error(v[j], gain[j], u)}, near).value;
            if (whole) {
                if (std::fabs(rest) <= 0x1p-95 * std::fabs(near.value)) rest = 0;
                rest += share * near.value;
            }
        }
        v[j] = rest / rho;
    }
}

}  // namespace rmsnorm::RMSNORM_LEVEL
