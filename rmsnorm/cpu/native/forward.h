// The forward pass on rows in memory: float64 inside, rounded once wherever the variant rounds.
//
//     y = h / rho * (o + scale) + bias,    h = x + residual
//
// Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
#pragma once

#include "parameters.h"
#include "single.h"

namespace rmsnorm::RMSNORM_LEVEL {

// A division by rho: by 1 / rho = inverse + rest it is as exact, and much faster.
struct Quotient {
    double rho, inverse, rest = 0;

    // `rest` is above 0: so it leaves a zero its sign and an infinite number as it is, which can be where a partial statistic
    // counts only zeros. Beside an infinite rho it is 0, and so is every quotient. A rho that is next to 0 comes from an eps
    // alone, and what is not 0 is infinite beside it.
    explicit Quotient(double rho) : rho(rho), inverse(0 < rho && rho <= 1e-150 ? 1e300 : 1 / rho) {
        if (1e-150 < rho && rho < 1e150) {  // so that nothing finite overflows
            inverse *= 1 - 0x1p-52;
            rest = std::fma(-inverse, rho, 1.0) * inverse;
        } else if (std::isfinite(rho)) {
            rest = 0x1p-1022;
        }
    }
};

// Where a variant rounds: y alone; h / rho and its product with the gain to float32; or as the call says.
enum class Rounding { last, single, any };

// Elements `from` to `to` of a row of y.
template <Format X, Format Y, Rounding R>
inline void fill_as(
    const Call& c, const Stored<X>* h, const double* gain, const double* bias, Quotient q, Stored<Y>* y,
    std::int64_t from, std::int64_t to) {
    D inverse = all_lanes(q.inverse), rest = all_lanes(q.rest);
    auto over = [=](D d) { return fma(d, inverse, d * rest); };
    by_eights(to - from, [=, &c](std::int64_t j, auto count) RMSNORM_BODY {
        j += from;
        D v = load<X>(h + j, count), g = load<Format::f64>(gain + j, count);
        if constexpr (R == Rounding::last) {  // the product comes first: it is exact up to 32 bits
            v = over(v * g);
        } else if constexpr (R == Rounding::single) {
            v = rounded<Format::f32>(over(v)) * g;  // is exact, and rounded when it is stored
            if constexpr (Y != Format::f32) v = rounded<Format::f32>(v);
        } else {
            v = rounded(rounded(over(v), c.norm) * g, c.product);
        }
        if (bias) v = rounded(v + load<Format::f64>(bias + j, count), R == Rounding::any ? c.product : Format::none);
        store<Y>(y + j, v, count);
    });
}

template <Format X, Format Y>
[[gnu::noinline]] void fill(
    const Call& c, const Stored<X>* h, const double* gain, const double* bias, Quotient q, Stored<Y>* y,
    std::int64_t from, std::int64_t to) {
    if (c.norm == Format::none) {
        fill_as<X, Y, Rounding::last>(c, h, gain, bias, q, y, from, to);
    } else if (c.norm == Format::f32 && c.product == Format::f32 && !bias) {
        fill_as<X, Y, Rounding::single>(c, h, gain, bias, q, y, from, to);
    } else {
        fill_as<X, Y, Rounding::any>(c, h, gain, bias, q, y, from, to);
    }
}

// A row of y in float32 arithmetic; see single.h. h / rho is rounded to the format NORM first, if that is not `none`.
template <Format X, Format Y, Format NORM>
inline void fill_single(
    const Call& c, const Stored<X>* h, const double* gain, const float* gain32, Quotient q, Stored<Y>* y) {
    constexpr bool before = NORM != Format::none;
    double around = (before ? half_units_before : half_units) * 0x1p-24;
    Float inverse = all_singles(static_cast<float>(1 / q.rho));
    Float less = all_singles(static_cast<float>((1 - around) / q.rho));
    Float more = all_singles(static_cast<float>((1 + around) / q.rho));
    bool cuts = before && Y != NORM && c.product == NORM;
    auto again = [=, &c](std::int64_t from, std::int64_t to) { fill<X, Y>(c, h, gain, nullptr, q, y, from, to); };
    auto compute_f16 = [=](std::int64_t j) RMSNORM_BODY {
        Float g, v = load_singles<X>(h + j);
        std::memcpy(&g, gain32 + j, sizeof g);
        if constexpr (!before) v *= g;
        Ends ends(v * less, v * more);
        if constexpr (before) {
            v = of_f16(ends.one) * g;  // exact, or rounded as the variant says
            if (cuts) v = of_f16(to_f16(v));
            store_singles<Y>(y + j, v);
        } else {
            std::memcpy(y + j, &ends.one, sizeof ends.one);
        }
        if (any(ends.differ())) [[unlikely]] call_rarely(again, j, j + singles);
    };
    auto compute_bf16 = [=](std::int64_t j) RMSNORM_BODY {
        Float g, v = load_singles<X>(h + j) * inverse;
        std::memcpy(&g, gain32 + j, sizeof g);
        if constexpr (!before) v *= g;
        Unsigned up = half_up(v);
        Word doubt = is_near_half(up, forward_units) | is_tiny_up(up);
        if constexpr (before) {
            v = (Float)(up & 0xffff0000) * g;  // exact, or rounded as the variant says
            doubt |= is_tiny(v);
            if (cuts) v = to_bf16(v);
        }
        if constexpr (before || Y != Format::bf16) {
            store_singles<Y>(y + j, v);
        } else {
            store_half_up(y + j, v, up);
        }
        if (any(doubt)) [[unlikely]] call_rarely(again, j, j + singles);
    };
    if constexpr ((before ? NORM : Y) == Format::f16) {
        by_registers(c.n, compute_f16, again);
    } else {
        by_registers(c.n, compute_bf16, again);
    }
}

// Whether the elements from `first` on are finite and below 2^60.
template <Format X>
inline bool are_small(const Stored<X>* h, std::int64_t first, std::int64_t n) {
    bool small = true;
    for (std::int64_t j = first; j < n; ++j) small &= std::fabs(number<X>(h[j])) < 0x1p60;
    return small;
}

template <Format X, Format Y>
inline void row_of_y(const Call& c, const Group& p, bool are_moderate, const Stored<X>* h, double rho, Stored<Y>* y) {
    Quotient q(rho);
    if (!p.bias && are_moderate && 0x1p-20 < rho && rho < 0x1p20 && (c.k == c.n || are_small<X>(h, c.k, c.n))) {
        if constexpr (is_short(Y)) {
            if (c.norm == Format::none) return fill_single<X, Y, Format::none>(c, h, p.gain, p.single, q, y);
        }
        if constexpr (is_short(X)) {
            if (c.norm == X) return fill_single<X, Y, X>(c, h, p.gain, p.single, q, y);
        }
    }
    fill<X, Y>(c, h, p.gain, p.bias, q, y, 0, c.n);
}

// Rows are taken by up to eight: so the roots and divisions of some narrow rows are computed at once.
template <Format X, Format Y>
void forward_rows(const Call& c, const Forward& a, const double* parameters, std::int64_t first, std::int64_t last) {
    constexpr std::int64_t most = 8;
    Parameters own{c, parameters};
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
        for (std::int64_t b = 0; b < count; ++b) rho[b] = rho_of(c, rho[b]);
        for (std::int64_t b = 0; b < count && a.inverse_rms; ++b) a.inverse_rms[start + b] = 1 / rho[b];
        for (std::int64_t b = 0; b < count; ++b) {
            std::int64_t i = start + b;
            row_of_y<X, Y>(c, own.of_group(i), own.are_moderate(), rows[b], rho[b], as<Stored<Y>>(a.y) + i * n);
        }
    }
}

}  // namespace rmsnorm::RMSNORM_LEVEL
