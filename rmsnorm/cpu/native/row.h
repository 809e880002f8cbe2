// A row in float64: which of its elements count, and its statistic.
//
// A row whose squares leave the range of float64 is multiplied by a power of two, which cancels in every result but 1 / rho.
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "gate.h"
#include "pairs.h"
#include "statistic.h"

namespace rmsnorm::RMSNORM_LEVEL {

using Marks = std::unique_ptr<std::uint8_t[]>;
inline Marks new_marks(const Call& c) { return Marks(new (std::nothrow) std::uint8_t[c.n]); }

[[gnu::noinline]] inline void load_any(Format format, const std::byte* from, double* to, std::int64_t n) {
    with_format(format, [=]<Format F>() { load_row<F>(as<Stored<F>>(from), to, n); });
}

[[gnu::noinline]] inline void store_any(Format format, std::byte* to, const double* from, std::int64_t n) {
    with_format(format, [=]<Format F>() { store_row<F>(as<Stored<F>>(to), from, n); });
}

// Which elements of the i-th group count, as bytes; returns null if all do.
inline const std::uint8_t* counted(const Call& c, const Mask& mask, std::int64_t i, std::uint8_t* counts) {
    if (!mask.data) return nullptr;
    const std::uint8_t* from = mask.data + place(c, i, mask.step, c.n * mask.stride);
    for (std::int64_t j = 0; j < c.n; ++j) counts[j] = from[j * mask.stride] != 0;
    return counts;
}

// A row that is normalised, x or x f(z), and what is known of it.
struct Row {
    double* h;
    const std::uint8_t* counts;  // null if all count
    std::int64_t k = 0;          // how many are in the statistic
    int shift = 0;               // h was multiplied by 2^shift
    double rho = 0;              // of h as it is now
    Call call;                   // with eps as it is beside such a row

    Row(const Call& c, double* h, const std::uint8_t* counts) : h(h), counts(counts), call(c) {
        k = counts ? std::count(counts, counts + c.k, 1) : c.k;
    }
    bool is_in(std::int64_t j) const { return !counts || counts[j]; }
};

// The mean square of a row; of one with a mask `used` gets what the statistic squares.
inline double mean_square(const Row& row, double* used) {
    const Call& c = row.call;
    if (!row.counts) return sum_of_squares<Format::f64>(row.h, c.k) / static_cast<double>(c.k);
    double size = static_cast<double>(row.k ? row.k : 1);
    for (std::int64_t j = 0; j < c.k; ++j) used[j] = row.is_in(j) ? row.h[j] : 0.0;
    std::fill(used + c.k, used + c.n, 0.0);
    return sum_of_squares<Format::f64>(used, c.k) / size;
}

constexpr std::int64_t no_exponent = -(std::int64_t{1} << 30);

inline std::int64_t exponent_of(double number) { return number != 0 ? std::ilogb(number) : no_exponent; }

// Beyond these the squares of a row may have lost digits.
constexpr double least_square = 0x1p-900, most_square = 0x1p900;

// Whether the squares of a row may have left the range, if their mean is q.
inline bool may_have_left(const Call& c, double q) {
    return q > most_square || (q < least_square && c.eps < 0x1p-400);
}

// Writes rho, and multiplies the row by a power of two where its squares leave the range.
//
// `rescale(exponent)` writes the row times 2^exponent, and `top()` is the exponent of its largest element that is in the
// statistic; no_exponent if there is none, or an infinite one.
template <class Rescale, class Top>
inline void measure(Row& row, double* used, Rescale rescale, Top top) {
    const Call& c = row.call;
    double q = mean_square(row, used);
    bool may_leave = c.x == Format::f64 || c.gate_before;
    if (may_leave && row.k && may_have_left(c, q)) {
        std::int64_t largest = top();
        if (largest > no_exponent) {
            std::int64_t most = c.eps == 0 ? 1 << 30 : (c.position == Position::inside ? 500 : 1000);
            row.shift = static_cast<int>(std::min(-largest, most));
            rescale(row.shift);
            row.call.eps = std::ldexp(row.call.eps, c.position == Position::inside ? 2 * row.shift : row.shift);
            q = mean_square(row, used);
        }
    }
    row.rho = rho_of(row.call, q, row.k);
}

// The same for a row of x.
inline void measure_plain(Row& row, double* used) {
    measure(
        row, used,
        [&](int shift) {
            for (std::int64_t j = 0; j < row.call.n; ++j) row.h[j] = std::ldexp(row.h[j], shift);
        },
        [&] {
            std::int64_t top = no_exponent;
            for (std::int64_t j = 0; j < row.call.k; ++j) {
                if (!row.is_in(j)) continue;
                if (!std::isfinite(row.h[j])) return no_exponent;
                top = std::max(top, exponent_of(row.h[j]));
            }
            return top;
        });
}

// The same for a row of x f(z), with f(z) and, if it is not null, f'(z), which are rescaled with it. `z` has room for the gate.
inline void measure_gated(
    Row& row, double* used, const double* x, const std::byte* gate, double* z, double* f, double* slope) {
    const Call& c = row.call;
    measure(
        row, used,
        [&](int shift) {
            for (std::int64_t j = 0; j < c.n; ++j) {
                ScaledFactor own = scaled_factor(c.function, z[j]);
                int by = std::clamp(own.exponent + shift, -2000, 1000);  // beyond, only an x of 0 has such an f(z)
                f[j] = std::ldexp(own.f, by);
                if (slope) slope[j] = std::ldexp(own.slope, by);
                row.h[j] = f[j] * x[j];
            }
        },
        [&] {
            std::int64_t top = no_exponent;
            load_any(c.gate, gate, z, c.n);
            for (std::int64_t j = 0; j < c.k; ++j) {
                if (!row.is_in(j) || x[j] == 0 || !(std::fabs(z[j]) <= gate_end)) continue;
                if (!std::isfinite(x[j])) return no_exponent;
                top = std::max(top, exponent_of(x[j]) + scaled_factor(c.function, z[j]).exponent);
            }
            return top;
        });
}

}  // namespace rmsnorm::RMSNORM_LEVEL
