// A row: h = x + residual, its statistic rho, and the gains that it is multiplied by.
#pragma once

#include "formats.h"

namespace rmsnorm::RMSNORM_LEVEL {

// Calls body(j, count) for each eight elements of n, and for the rest, with how many there are.
template <class Body>
inline void by_eights(std::int64_t n, Body body) {
    std::int64_t j = 0;
    for (; j + lanes <= n; j += lanes) body(j, lanes);
    if (j < n) body(j, static_cast<int>(n - j));
}

// Eight numbers, or the first ones of a row's end and zeros.
template <Format F>
inline D load(const Stored<F>* from, int count) {
    return count == lanes ? load<F>(from) : load_first<F>(from, count);
}

template <Format F>
inline void store(Stored<F>* to, D d, int count) {
    if (count == lanes) {
        store<F>(to, d);
    } else {
        store_first<F>(to, d, count);
    }
}

// The sum over a row of what body(sum of a lane, j, count) adds; element j is in lane j % 8 of total j / 8 % 4.
template <class Body>
inline double sum_over(std::int64_t n, Body body) {
    Sum sum;
    std::int64_t j = 0;
    for (; j + 4 * lanes <= n; j += 4 * lanes) {
        for (int i = 0; i < 4; ++i) sum.total[i] = body(sum.total[i], j + lanes * i, lanes);
    }
    for (int i = 0; j + lanes <= n; j += lanes, ++i) sum.total[i] = body(sum.total[i], j, lanes);
    if (j < n) {
        int i = static_cast<int>(j / lanes % 4);
        sum.total[i] = body(sum.total[i], j, static_cast<int>(n - j));
    }
    return sum.value();
}

template <Format X>
inline double sum_of_squares(const Stored<X>* h, std::int64_t k) {
    return sum_over(k, [=](D total, std::int64_t j, int count) {
        D v = load<X>(h + j, count);
        return fma(v, v, total);
    });
}

template <Format X>
inline void add_rows(const Stored<X>* x, const Stored<X>* residual, Stored<X>* h, std::int64_t n) {
    by_eights(n, [=](std::int64_t j, int count) {
        store<X>(h + j, load<X>(x + j, count) + load<X>(residual + j, count), count);
    });
}

// rho of the mean square of k elements.
inline double rho_of(const Call& c, double q, std::int64_t k) {
    if (c.position == Position::inside) return std::sqrt(q + c.eps);
    if (c.position == Position::outside) return std::sqrt(q) + c.eps;
    double root = std::sqrt(q), floor = c.eps / std::sqrt(static_cast<double>(k ? k : 1));
    return root < floor ? floor : root;
}

// rho / s, with drho / dh = h / (k s): 1 for eps inside, rho / (rho - eps) outside, 1 or 0 for a clamp.
//
// For eps outside it comes from `length`, the squared length of h / rho: rho - eps is the root of the mean square.
inline double slope_of(const Call& c, std::int64_t k, double inverse_rms, double length) {
    double size = static_cast<double>(k ? k : 1);
    if (c.position == Position::inside) return 1.0;
    if (c.position == Position::outside) return length / size > 0 ? 1 / std::sqrt(length / size) : 0.0;
    return inverse_rms * c.eps / std::sqrt(size) < 1 - 0x1p-50 ? 1.0 : 0.0;  // 1 / rho is rounded
}

// Where the i-th group begins, in bytes. A step leads from a row to the next, and a group has `bytes`.
inline std::int64_t place(const Call& c, std::int64_t i, std::int64_t step, std::int64_t bytes) {
    return c.groups == 1 ? i * step : i / c.groups * step + i % c.groups * bytes;
}

inline std::int64_t group_of(const Call& c, std::int64_t i) { return c.groups == 1 ? 0 : i % c.groups; }

// The parameters that `prepare` wrote.
struct Parameters {
    const double *gain, *bias;
    const float* single;  // the gains in float32
    bool are_moderate;    // a product with any of these gains underflows only where the result is next to nothing, too

    Parameters(const Call& c, const double* from)
        : gain(from),
          bias(from + c.width()),
          single(reinterpret_cast<const float*>(from + 2 * c.width() + 1)),
          are_moderate(from[2 * c.width()] != 0) {}
};

// Whether y or dx may be computed in float32 arithmetic (see single.h), or products with the gain are of float32.
inline bool needs_singles(const Call& c, bool is_backward) {
    auto is_one = [](Format format) { return format == Format::bf16 || format == Format::f32; };
    if (is_backward) return c.x == Format::bf16 && c.y == Format::bf16;
    Format decides = c.norm == Format::none ? c.y : c.norm;
    return is_one(c.x) && is_one(c.y) && (decides == Format::bf16 || (c.norm == Format::f32 && c.product == Format::f32));
}

inline void prepare(
    const Call& c, const std::byte* scale, const std::byte* bias, bool is_backward, double* parameters) {
    std::int64_t width = c.width();
    double *gain = parameters, *flag = parameters + 2 * width;
    float* single = reinterpret_cast<float*>(flag + 1);
    if (scale) {
        with_format(c.scale, [=]<Format F>() { load_row<F>(as<Stored<F>>(scale), gain, width); });
    } else {
        for (std::int64_t j = 0; j < width; ++j) gain[j] = 1.0;
    }
    if (scale && c.offset != 0) {  // the gradients are those of the formula, which rounds nothing
        Format product = c.norm != Format::none && !is_backward ? c.product : Format::none;
        by_eights(width, [=, &c](std::int64_t j, int count) {
            D sum = load<Format::f64>(gain + j, count) + all_lanes(c.offset);
            store<Format::f64>(gain + j, rounded(sum, product), count);
        });
    }
    if (needs_singles(c, is_backward)) {
        Bits wrong[parts] = {};
        by_eights(width, [=, &wrong](std::int64_t j, int count) {
            D g = load<Format::f64>(gain + j, count), size = magnitude(g);
            store<Format::f32>(single + j, g, count);
            for (int i = 0; i < parts; ++i) {
                Part part = size.part[i];
                wrong[i] |= (part != 0.0) & ~((part > 0x1p-40) & (part < 0x1p16));
            }
        });
        for (int i = 1; i < parts; ++i) wrong[0] |= wrong[i];
        *flag = !any(wrong[0]);
    }
    if (bias) with_format(c.bias, [=]<Format F>() { load_row<F>(as<Stored<F>>(bias), parameters + width, width); });
}

}  // namespace rmsnorm::RMSNORM_LEVEL
