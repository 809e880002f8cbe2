// The parameters of a call: the gains o + scale and the biases, and those of one group of elements.
#pragma once

#include "statistic.h"

namespace rmsnorm::RMSNORM_LEVEL {

constexpr bool is_short(Format format) { return format == Format::f16 || format == Format::bf16; }

// A row to float64, and back.
template <Format F>
inline void load_row(const Stored<F>* from, double* to, std::int64_t n) {
    by_eights(n, [=](std::int64_t j, auto count) RMSNORM_BODY { store<Format::f64>(to + j, load<F>(from + j, count), count); });
}

template <Format F>
inline void store_row(Stored<F>* to, const double* from, std::int64_t n) {
    by_eights(n, [=](std::int64_t j, auto count) RMSNORM_BODY { store<F>(to + j, load<Format::f64>(from + j, count), count); });
}

// Whether y or dx may be computed in float32 arithmetic; see single.h.
inline bool needs_singles(const Call& c, bool is_backward) {
    if (is_backward) return is_short(c.x) && c.x == c.y;
    return is_short(c.norm == Format::none ? c.y : c.norm);
}

inline void prepare(const Call& c, const std::byte* scale, const std::byte* bias, bool is_backward, double* parameters) {
    std::int64_t all = c.width();
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

// The parameters that `prepare` wrote, and the sums of a call.
struct Parameters {
    const Call& c;
    const double* from;
    double* sums = nullptr;
    bool has_dscale = false, has_dbias = false;

    // Whether a product with any of the gains underflows only where the result is next to nothing, too.
    bool are_moderate() const { return from[2 * c.width()] != 0; }

    // The i-th group of the call.
    Group of_group(std::int64_t i) const {
        std::int64_t all = c.width(), first = group_of(c, i) * c.n;
        const double* bias = c.bias != Format::none ? from + all + first : nullptr;
        const float* single = reinterpret_cast<const float*>(from + 2 * all + 1) + first;
        return {from + first, bias, single, has_dscale ? sums + first : nullptr, has_dbias ? sums + all + first : nullptr};
    }
};

}  // namespace rmsnorm::RMSNORM_LEVEL
