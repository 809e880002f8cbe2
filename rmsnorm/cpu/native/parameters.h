// The parameters of a call: the gains o + scale and the biases, and those of one group of elements.
#pragma once

#include <algorithm>

#include "statistic.h"

namespace rmsnorm::RMSNORM_LEVEL {

// The parameters that `prepare` wrote.
struct Parameters {
    const double *gain, *bias;
    const float* single;  // the gains in float32
    bool are_moderate;    // a product with any of these gains underflows only where the result is next to nothing, too

    Parameters(const Call& c, const double* from)
        : gain(from),
          bias(from + c.features),
          single(reinterpret_cast<const float*>(from + 2 * c.features + 1)),
          are_moderate(from[2 * c.features] != 0) {}
};

constexpr bool is_short(Format format) { return format == Format::f16 || format == Format::bf16; }

// The formats of rows that may be computed in float32 arithmetic (see single.h): not float64, and not both of 16 bits.
constexpr bool are_single(Format x, Format y) {
    bool is_mixed = is_short(x) && is_short(y) && x != y;
    return !is_mixed && (is_short(x) || x == Format::f32) && (is_short(y) || y == Format::f32);
}
template <Format X, Format Y>
constexpr bool may_be_single = are_single(X, Y);

// Whether y or dx may be computed so.
inline bool needs_singles(const Call& c, bool is_backward) {
    if (is_backward) return is_short(c.x) && c.x == c.y;
    return are_single(c.x, c.y) && is_short(c.norm == Format::none ? c.y : c.norm);
}

inline void prepare(
    const Call& c, const std::byte* scale, const std::byte* bias, bool is_backward, double* parameters) {
    std::int64_t all = c.features;
    double *gain = parameters, *flag = parameters + 2 * all;
    float* single = reinterpret_cast<float*>(flag + 1);
    *flag = 0;
    if (scale) {
        with_format(c.scale, [=]<Format F>() { load_row<F>(as<Stored<F>>(scale), gain, all); });
    } else {
        for (std::int64_t j = 0; j < all; ++j) gain[j] = 1.0;
    }
    if (scale && c.offset != 0) {  // the gradients are those of the formula, which rounds nothing
        Format product = c.norm != Format::none && !is_backward ? c.product : Format::none;
        by_eights(all, [=, &c](std::int64_t j, auto count) RMSNORM_BODY {
            D sum = load<Format::f64>(gain + j, count) + all_lanes(c.offset);
            store<Format::f64>(gain + j, rounded(sum, product), count);
        });
    }
    if (is_backward || needs_singles(c, is_backward)) {
        *flag = !any_of_eights(all, [=](Marked wrong, std::int64_t j, auto count) RMSNORM_BODY {
            D g = load<Format::f64>(gain + j, count), size = magnitude(g);
            store<Format::f32>(single + j, g, count);
            for (int i = 0; i < parts; ++i) {
                Part part = size.part[i];
                wrong.part[i] |= (part != 0.0) & ~((part > 0x1p-40) & (part < 0x1p16));
            }
            return wrong;
        });
    }
    if (bias) with_format(c.bias, [=]<Format F>() { load_row<F>(as<Stored<F>>(bias), parameters + all, all); });
}

// What a group of elements has for each of them: the parameters, and the sums for the gradients of these.
struct Group {
    const double *gain, *bias;  // bias: null without one
    const float* single;        // the gains in float32
    double *dscale, *dbias;     // null where they are not asked for
};

// The groups of a call. Where elements share a parameter, it is written out for each of them, and their sums are added up.
class Groups {
    const Call& c;
    Parameters p;
    bool has_bias, has_singles, has_dscale, has_dbias;
    double* sums;
    Rows memory;
    std::int64_t written = -1;  // the group whose parameters are in the memory
    Group own{};

    // Calls body(j, count, i) for `count` neighbours from the j-th element of a group on, which share the i-th parameter.
    template <class Body>
    void by_parameters(std::int64_t group, Body body) const {
        std::int64_t place = group * c.n, i = place / c.spread % c.features, left = c.spread - place % c.spread;
        for (std::int64_t j = 0; j < c.n; left = c.spread) {
            std::int64_t count = std::min(left, c.n - j);
            body(j, count, i);
            j += count;
            i = i + 1 == c.features ? 0 : i + 1;
        }
    }

    void write_out(std::int64_t group) {
        double *gain = memory.get(), *bias = gain + c.n;
        float* single = reinterpret_cast<float*>(gain + 4 * c.n);
        by_parameters(group, [&](std::int64_t j, std::int64_t count, std::int64_t i) {
            std::fill_n(gain + j, count, p.gain[i]);
            if (has_singles) std::fill_n(single + j, count, p.single[i]);
            if (has_bias) std::fill_n(bias + j, count, p.bias[i]);
        });
        own = {gain, has_bias ? bias : nullptr, single, has_dscale ? gain + 2 * c.n : nullptr,
               has_dbias ? gain + 3 * c.n : nullptr};
        written = group;
    }

public:
    // `sums` is null in the forward pass.
    Groups(
        const Call& c, const double* parameters, bool has_bias, double* sums, bool has_dscale = false, bool has_dbias = false)
        : c(c), p(c, parameters), has_bias(has_bias), has_singles(needs_singles(c, sums != nullptr)),
          has_dscale(has_dscale), has_dbias(has_dbias), sums(sums) {
        if (!c.has_own()) memory = new_rows(c, 5);
    }
    bool has_memory() const { return c.has_own() || memory; }
    bool are_moderate() const { return p.are_moderate; }

    // The i-th group of the call.
    const Group& at(std::int64_t i) {
        std::int64_t group = group_of(c, i), first = group * c.n;
        if (c.has_own()) {
            own = {p.gain + first, has_bias ? p.bias + first : nullptr, p.single + first,
                   has_dscale ? sums + first : nullptr, has_dbias ? sums + c.features + first : nullptr};
        } else {
            if (written != group) write_out(group);
            if (has_dscale) std::fill_n(own.dscale, c.n, 0.0);
            if (has_dbias) std::fill_n(own.dbias, c.n, 0.0);
        }
        return own;
    }

    // Adds the sums of the i-th group to those of the call, where they are not the same.
    void add(std::int64_t i) {
        if (c.has_own()) return;
        by_parameters(group_of(c, i), [&](std::int64_t j, std::int64_t count, std::int64_t feature) {
            auto total = [count](const double* from) {
                return sum_over(count, [=](D sum, std::int64_t e, auto some) RMSNORM_BODY {
                    return sum + load<Format::f64>(from + e, some);
                });
            };
            if (has_dscale) sums[feature] += total(own.dscale + j);
            if (has_dbias) sums[c.features + feature] += total(own.dbias + j);
        });
    }
};

}  // namespace rmsnorm::RMSNORM_LEVEL
