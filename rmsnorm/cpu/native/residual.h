// h = x + residual, rounded once to the format of x.
//
// The sum of two float32 or of two 16-bit numbers is taken in float32. A second rounding, to 16 bits, changes nothing:
// float32 has 24 bits, and twice the 11 bits of float16 and two more are 24. Source: Figueroa 1995, "When is double
// rounding innocuous?". Sums that are subnormal numbers are exact. Many sums of 16-bit numbers are in the middle
// between two of the format; rounding from float64 by way of float32 would take each of them for a doubt.
#pragma once

#include "single.h"

namespace rmsnorm::RMSNORM_LEVEL {

// The nearest number of a format, to even, of any float32: also subnormal ones, infinity and NaN.
template <Format F>
RMSNORM_INLINE void store_nearest(Stored<F>* to, Float x) {
    if constexpr (F != Format::bf16) {
        store_singles<F>(to, x);
    } else {
        Unsigned word = (Unsigned)x;
        Word is_nan = x != x;
        Unsigned near = word + 0x7fff + ((word >> 16) & 1);  // NaN could become a number
        store_words(to, (((Unsigned)is_nan & (word | 0x400000)) | (~(Unsigned)is_nan & near)) >> 16);
    }
}

template <Format X>
[[gnu::noinline]] void add_rows(const Stored<X>* x, const Stored<X>* residual, Stored<X>* h, std::int64_t n) {
    std::int64_t first = 0;
    if constexpr (X != Format::f64) {
        for (; first + singles <= n; first += singles) {
            store_nearest<X>(h + first, load_singles<X>(x + first) + load_singles<X>(residual + first));
        }
    }
    by_eights(n - first, [=](std::int64_t j, auto count) RMSNORM_BODY {
        j += first;
        store<X>(h + j, load<X>(x + j, count) + load<X>(residual + j, count), count);
    });
}

}  // namespace rmsnorm::RMSNORM_LEVEL
