// The factor f(z) of a gate z and its derivative.
//
//     sigmoid: f = s(z),    f' = s(z) s(-z)            s(z) = 1 / (1 + exp(-z))
//     silu:    f = z s(z),  f' = s(z) (1 + z s(-z))
//
// exp(r) for |r| <= log(2) / 2 is a polynomial 1 + r + r^2 q(r). Its coefficients are Chebyshev's: it is within 2^-55.
#pragma once

#include "single.h"

namespace rmsnorm::RMSNORM_LEVEL {

constexpr double last_exponent = 708.0;  // exp(z) is a normal number for z between its negative and it
constexpr double rounds = 1.5 * 0x1p52;  // a sum with it has no fraction
// s(z) is below 1 for every z, and f' of silu above 1 where s(z) rounds to 1. A product rounded with exactly 1 could be
// in the middle between two numbers, where the exact one is not.
constexpr double below_one = 1 - 0x1p-51, above_one = 1 + 0x1p-51;
constexpr double gate_end = 0x1p16;  // for z below its negative f(z) is 0, as in the golden

RMSNORM_INLINE Part choose(Bits mask, Part yes, Part no) { return mask ? yes : no; }

// exp(size) = fraction * 2^whole, to an ulp. The last bits of `sum` are `whole`. The registers take each step side by side, as
// each has to wait for the step before.
RMSNORM_INLINE void exponential(const D& size, D& fraction, D& sum) {
    auto step = [](const D& a, const D& b, double c) { return fma(a, b, all_lanes(c)); };
    sum = step(size, all_lanes(1.4426950408889634), rounds);
    D whole = sum - all_lanes(rounds);
    // log(2) in two parts: the first has 33 bits, so its product with a small integer is exact
    D r = fma(whole, all_lanes(-1.9082149292705877e-10), fma(whole, all_lanes(-0.6931471803691238), size));
    D q = step(all_lanes(2.5100375832561234e-08), r, 2.7620075879983367e-07);
    q = step(q, r, 2.7557268480310024e-06);
    q = step(q, r, 2.480152132236869e-05);
    q = step(q, r, 0.00019841269863040545);
    q = step(q, r, 0.0013888888917196719);
    q = step(q, r, 0.008333333333330065);
    q = step(q, r, 0.041666666666624164);
    q = step(q, r, 0.16666666666666669);
    q = step(q, r, 0.5000000000000001);
    fraction = step(step(q, r, 1.0), r, 1.0);
}

constexpr double moderate_gate = 34.0;  // up to it exp(-z) is a normal number, and 1 + exp(-z) is above 1

RMSNORM_INLINE Bits is_immoderate(Part z) { return ~((Part)((Bits)z & 0x7fffffffffffffff) <= moderate_gate); }  // also NaN

// exp(-z) where z is moderate.
RMSNORM_INLINE D moderate_power(const D& z) {
    D size, fraction, sum, power;
    for (int i = 0; i < parts; ++i) size.part[i] = -z.part[i];
    exponential(size, fraction, sum);
    for (int i = 0; i < parts; ++i) {
        power.part[i] = (Part)((Naturals)fraction.part[i] + ((Naturals)sum.part[i] << 52));
    }
    return power;
}

// f(z) and f'(z).
struct PartFactor {
    Part f, slope;
};

// Those of a register, whatever z is. It is not inlined, as it is rare.
[[gnu::noinline, gnu::cold]] inline PartFactor factor_again(Function function, Part z) {
    Part size = choose(-z > last_exponent, all(last_exponent), -z);  // NaN stays
    D wide, fraction, sum;
    for (auto& part : wide.part) part = choose(size < -last_exponent, all(-last_exponent), size);
    exponential(wide, fraction, sum);
    Part power = fraction.part[0] * (Part)(((Naturals)sum.part[0] + 1023) << 52), share = 1.0 / (1.0 + power);
    Part own = choose(z <= -last_exponent, all(0.0), share), rest = choose(z >= last_exponent, all(0.0), power * share);
    Bits is_one = share > below_one;
    share = choose(is_one, all(below_one), own);
    if (function != Function::silu) return {share, own * rest};
    Part steep = own * (1.0 + z * rest);
    return {z * share, choose(is_one & (steep < above_one), all(above_one), steep)};
}

// f(z) and, if `slope` is not null, f'(z).
RMSNORM_INLINE D factor(Function function, const D& z, D* slope = nullptr) {
    D power = moderate_power(z), f, steep;
    for (int i = 0; i < parts; ++i) {
        Part x = z.part[i], share = 1.0 / (1.0 + power.part[i]), rest = power.part[i] * share;
        f.part[i] = function == Function::silu ? x * share : share;
        steep.part[i] = function == Function::silu ? share * (1.0 + x * rest) : share * rest;
        Bits is_other = is_immoderate(x);
        if (any(is_other)) [[unlikely]] {  // of which the others in the register see nothing, however many it has
            PartFactor again = factor_again(function, x);
            f.part[i] = choose(is_other, again.f, f.part[i]);
            steep.part[i] = choose(is_other, again.slope, steep.part[i]);
        }
    }
    if (slope) *slope = steep;
    return f;
}

// 1 + exp(-z) where z is moderate.
RMSNORM_INLINE D divisor_of(const D& z) { return all_lanes(1.0) + moderate_power(z); }

// n f(z), with the divisor of z.
RMSNORM_INLINE D gated(Function function, const D& n, const D& z, const D& divisor) {
    D result;
    for (int i = 0; i < parts; ++i) {
        Part x = z.part[i];
        result.part[i] = (function == Function::silu ? n.part[i] * x : n.part[i]) / divisor.part[i];
        Bits is_other = is_immoderate(x);
        if (any(is_other)) [[unlikely]] {
            result.part[i] = choose(is_other, n.part[i] * factor_again(function, x).f, result.part[i]);
        }
    }
    return result;
}

constexpr float single_gate = 80.0f;

// f(z) of a z in float32, in float32, within 5 units of 2^-24 for |z| up to `single_gate`.
//
// These are 3 for the exponential (1 for its argument, 1.5 for the last two steps of the polynomial), one each for the
// sum, the quotient and the product, of which the exponential's errors count where it is not much less than 1.
RMSNORM_INLINE Float factor(Function function, Float z) {
    auto f = [](Float a, Float b, float c) { return fma(a, b, all_singles(c)); };
    constexpr float rounding = 1.5f * 0x1p23f;
    Float sum = f(z, all_singles(-1.4426950408889634f), rounding), whole = sum - rounding;
    Float r = fma(whole, all_singles(2.12194440e-4f), fma(whole, all_singles(-0.693359375f), -z));
    Float q = f(f(f(f(all_singles(0.0013926176f), r, 0.008363173f), r, 0.041666556f), r, 0.16666578f), r, 0.5f);
    Float power = (Float)((Unsigned)f(f(q, r, 1.0f), r, 1.0f) + ((Unsigned)sum << 23));
    return (function == Function::silu ? z : all_singles(1.0f)) / (1.0f + power);
}

// f(z) and f'(z) of one z as numbers near 1 or of the size of z, times 2^exponent: also where they are next to nothing.
struct ScaledFactor {
    double f, slope;
    int exponent;
};

inline ScaledFactor scaled_factor(Function function, double z) {
    if (!(z < 0)) {
        D slope, f = factor(function, all_lanes(z), &slope);
        return {f.part[0][0], slope.part[0][0], 0};
    }
    if (z < -gate_end) return {0, 0, 0};
    D fractions, sums;
    exponential(all_lanes(z), fractions, sums);
    double fraction = fractions.part[0][0];
    int exponent = static_cast<int>(sums.part[0][0] - rounds);
    double power = z > -last_exponent ? std::ldexp(fraction, exponent) : 0;  // exp(z) = fraction * 2^exponent
    double share = fraction / (1 + power), rest = 1 / (1 + power);           // s(z) less its power of two, s(-z)
    if (function == Function::silu) return {z * share, share * (1 + z * rest), exponent};
    return {share, share * rest, exponent};
}

}  // namespace rmsnorm::RMSNORM_LEVEL
