// Rows with a mask, of float64, or whose squares leave the range: a row is read to float64 once.
//
// What a mask leaves out is 0 in a row, so that it adds nothing to a sum.
#pragma once

#include "backward.h"
#include "gated.h"
#include "residual.h"
#include "row.h"

namespace rmsnorm::RMSNORM_LEVEL {

// y before a gate, as the variant rounds it; 0 in a row with nothing counted.
inline void fill_row(const Row& row, const double* gain, const double* bias, double* y) {
    const Call& c = row.call;
    if (row.k) {
        Quotient q(row.rho, c.scale != Format::f64 && c.x != Format::f64 && !c.gate_before);
        fill<Format::f64, Format::f64>(c, row.h, gain, bias, q, y, 0, c.n);
    } else {
        std::fill(y, y + c.n, 0.0);
    }
}

// The groups from `first` to before `last`.
inline bool forward_general(
    const Call& c, const Forward& a, const double* parameters, std::int64_t first, std::int64_t last) {
    Groups groups(c, parameters, a.bias != nullptr, nullptr);
    Rows memory = new_rows(c, 5);
    Marks marks = new_marks(c);
    if (!memory || !marks || !groups.has_memory()) return false;
    std::int64_t n = c.n, x_bytes = n * size_of(c.x), y_bytes = n * size_of(c.y);
    double *h = memory.get(), *y = h + n, *z = y + n, *f = z + n, *own = f + n;
    for (std::int64_t i = first; i < last; ++i) {
        const std::byte* x = a.x + place(c, i, a.x_step, x_bytes);
        if (a.residual) {
            with_format(c.x, [&]<Format X>() {
                add_rows<X>(as<Stored<X>>(x), as<Stored<X>>(a.residual) + i * n, as<Stored<X>>(a.h) + i * n, n);
            });
            x = a.h + i * x_bytes;
        }
        load_any(c.x, x, h, n);
        Row row(c, h, counted(c, a.mask, i, marks.get()));
        const std::byte* gate = a.gate ? a.gate + place(c, i, a.gate_step, n * size_of(c.gate)) : nullptr;
        if (c.gate_before) {
            factors(c, gate, f, nullptr);
            for (std::int64_t j = 0; j < n; ++j) own[j] = h[j], h[j] *= f[j];
            measure_gated(row, y, own, gate, z, f, nullptr);
        } else {
            measure_plain(row, y);
        }
        if (a.inverse_rms) a.inverse_rms[i] = row.k ? std::ldexp(1 / row.rho, row.shift) : 0.0;
        if (!a.y) continue;
        const Group& group = groups.at(i);
        fill_row(row, group.gain, group.bias, y);
        if (gate && !c.gate_before && row.k) {
            factors(c, gate, f, nullptr);
            for (std::int64_t j = 0; j < n; ++j) y[j] *= f[j];
        }
        store_any(c.y, a.y + i * y_bytes, y, n);
    }
    return true;
}

// Writes to `used` the elements of h / rho that are in the statistic, and 0 for the others.
inline void divide_counted(const Row& row, double inverse, double* used) {
    const Call& c = row.call;
    if (row.counts) {
        for (std::int64_t j = 0; j < c.k; ++j) used[j] = row.is_in(j) ? row.h[j] : 0.0;
    } else {
        std::copy(row.h, row.h + c.k, used);
    }
    std::fill(used + c.k, used + c.n, 0.0);
    for (std::int64_t j = 0; j < c.k; ++j) used[j] *= inverse;
}

// 0 in place of what a mask leaves out.
inline void leave_out(const Row& row, double* numbers) {
    if (row.k && !row.counts) return;
    for (std::int64_t j = 0; j < row.call.n; ++j) numbers[j] = row.k && row.is_in(j) ? numbers[j] : 0.0;
}

// What is multiplied by f(z), `other` times `rest`, times f'(z), in place of `rest`.
inline void gradient_of_gate(const Row& row, const double* other, const double* slope, double* rest) {
    for (std::int64_t j = 0; j < row.call.n; ++j) rest[j] = rest[j] * other[j] * slope[j] + 0.0;
    leave_out(row, rest);
}

constexpr std::int64_t far_exponent = 300;  // so far from 0 a product of two such numbers is within the range

// Where dy, `v`, or a gain of float64 is far from 1: both without the power of two of their largest number, the gain in
// `copy`. Returns the two exponents, without which no product of these leaves the range.
inline std::pair<int, int> take_powers(const Call& c, double* v, const double*& gain, double* copy) {
    auto top = [&c](const double* numbers) {  // as integers, magnitudes are in the order of their sizes
        std::int64_t largest = 0;
        for (std::int64_t j = 0; j < c.n; ++j) {
            largest = std::max(largest, bits<std::int64_t>(numbers[j]) & 0x7fffffffffffffff);
        }
        double size = bits<double>(largest);
        return std::isfinite(size) ? exponent_of(size) : no_exponent;
    };
    std::int64_t of_v = top(v), of_gain = top(gain);
    bool is_far = std::abs(of_v) > far_exponent || std::abs(of_gain) > far_exponent;
    if (!is_far || of_v == no_exponent || of_gain == no_exponent) return {0, 0};
    int a = static_cast<int>(of_v), b = static_cast<int>(of_gain);
    for (std::int64_t j = 0; j < c.n; ++j) {
        v[j] = std::ldexp(v[j], -a);
        copy[j] = std::ldexp(gain[j], -b);
    }
    gain = copy;
    return {a, b};
}

// Writes the i-th row of dx + dh, of which dx is multiplied by f first, if that is not null.
inline void store_dx(const Call& c, const Backward& a, std::int64_t i, const double* dx, const double* f = nullptr) {
    with_format(c.x, [=, &c, &a]<Format X>() {
        Stored<X>* to = as<Stored<X>>(a.dx) + i * c.n;
        const Stored<X>* dh = a.dh ? as<Stored<X>>(a.dh) + i * c.n : nullptr;
        by_eights(c.n, [=](std::int64_t j, auto count) RMSNORM_BODY {
            D v = load<Format::f64>(dx + j, count);
            if (f) v = v * load<Format::f64>(f + j, count);
            if (dh) v = v + load<X>(dh + j, count);
            store<X>(to + j, v + all_lanes(0.0), count);  // a zero becomes +0
        });
    });
}

constexpr double may_cancel = 0x1p-16;  // here rows are not tested for being along h

inline bool backward_general(
    const Call& c, const Backward& a, const double* parameters, double* sums, std::int64_t first, std::int64_t last) {
    Groups groups(c, parameters, a.bias != nullptr, sums, a.dscale, a.dbias);
    bool is_wide = c.x == Format::f64 || c.y == Format::f64 || c.scale == Format::f64;
    Rows memory = new_rows(c, is_wide ? 9 : 8);
    Marks marks = new_marks(c);
    if (!memory || !marks || !groups.has_memory()) return false;
    std::int64_t n = c.n, x_bytes = n * size_of(c.x), y_bytes = n * size_of(c.y);
    double *h = memory.get(), *v = h + n, *used = v + n, *dx = used + n;
    double *z = dx + n, *f = z + n, *slope = f + n, *own = slope + n;  // own: x, or dy, before f(z)
    for (std::int64_t i = first; i < last; ++i) {
        load_any(c.x, a.h + place(c, i, a.h_step, x_bytes), h, n);
        load_any(c.y, a.dy + i * y_bytes, v, n);
        Row row(c, h, counted(c, a.mask, i, marks.get()));
        std::int64_t k = row.k;
        const Group& group = groups.at(i);
        const double* gain = group.gain;
        double *dscale = group.dscale, *dbias = group.dbias;
        const std::byte* gate = a.gate ? a.gate + place(c, i, a.gate_step, n * size_of(c.gate)) : nullptr;
        if (gate) {
            factors(c, gate, f, slope);
            double* weighed = c.gate_before ? h : v;
            for (std::int64_t j = 0; j < n; ++j) own[j] = weighed[j], weighed[j] *= f[j];
        }
        if (c.gate_before) {
            measure_gated(row, used, own, gate, z, f, slope);
        } else {
            measure_plain(row, used);
        }
        double inverse = k ? 1 / row.rho : 0.0;
        if (a.dgate && !c.gate_before) {  // beside dy
            fill_row(row, gains_of_y(c, gain, dx), group.bias, dx);
            gradient_of_gate(row, own, slope, dx);
            store_any(c.gate, a.dgate + i * n * size_of(c.gate), dx, n);
        }
        divide_counted(row, inverse, used);
        leave_out(row, h);  // what is under the mask reaches no gradient, nor an infinite 1 / rho
        leave_out(row, v);
        double* normalised = dx;
        for (std::int64_t j = 0; j < n; ++j) normalised[j] = h[j] * inverse;
        leave_out(row, normalised);
        for (std::int64_t j = 0; j < n && dbias; ++j) dbias[j] += v[j];
        auto [of_v, of_gain] = is_wide ? take_powers(c, v, gain, own + n) : std::pair{0, 0};
        double power = std::ldexp(1.0, of_v);
        double inner = sum_over(n, [=, p = all_lanes(power), gain = gain](D total, std::int64_t j, auto count) RMSNORM_BODY {
            D term = load<Format::f64>(v + j, count) * load<Format::f64>(normalised + j, count);
            if (dscale) store<Format::f64>(dscale + j, load<Format::f64>(dscale + j, count) + term * p, count);
            return total + term * load<Format::f64>(gain + j, count);
        });
        groups.add(i);
        if (!a.dx && !(a.dgate && c.gate_before)) continue;
        double length = needs_length(row.call, k, inverse) ? sum_of_squares<Format::f64>(used, n) : 0.0;
        double share = slope_of(row.call, k, inverse, length) * inner / static_cast<double>(k ? k : 1);
        bool again = false;
        if (row.counts) {
            for (std::int64_t j = 0; j < n; ++j) {
                double near = j < c.k ? used[j] * share : 0.0, rest = v[j] * gain[j] - near;
                dx[j] = inverse * rest;
                again |= std::fabs(rest) < may_cancel * std::fabs(near);
            }
            leave_out(row, dx);
        } else {
            again = is_along<Format::f64, Format::f64>(used, v, gain, share, c.k);
            again |= fill_gradient<Format::f64, Format::f64>(used, v, nullptr, gain, inverse, share, dx, 0, c.k);
            fill_gradient<Format::f64, Format::f64>(nullptr, v, nullptr, gain, inverse, 0.0, dx, c.k, n);
        }
        if (again && c.x != Format::f64) {
            cancelled(row.call, h, v, gain, row.counts);
            std::copy(v, v + n, dx);
        }
        if (of_v || of_gain) {
            for (std::int64_t j = 0; j < n; ++j) dx[j] = std::ldexp(dx[j], of_v + of_gain);
        }
        if (c.gate_before) {
            if (a.dgate) {
                std::copy(dx, dx + n, v);
                gradient_of_gate(row, own, slope, v);
                store_any(c.gate, a.dgate + i * n * size_of(c.gate), v, n);
            }
            for (std::int64_t j = 0; j < n; ++j) dx[j] *= f[j];
            leave_out(row, dx);
        } else if (row.shift) {
            for (std::int64_t j = 0; j < n; ++j) dx[j] = std::ldexp(dx[j], row.shift);
        }
        if (a.dx) store_dx(c, a, i, dx);
    }
    return true;
}

}  // namespace rmsnorm::RMSNORM_LEVEL
