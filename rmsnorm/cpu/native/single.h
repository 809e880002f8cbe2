// Rows of 16 bits in float32 arithmetic, which is several times as fast, with the bits of float64 arithmetic.
//
// The sums were computed in float64 before. What is left has so few roundings that their errors are bounded by a few
// 2^-24 of the terms: if both ends of that interval round to the same number of 16 bits, so does the exact result. Else,
// or if an element is out of range, a register is computed again in float64. That happens to one element of bfloat16 in
// some thousands. float16 has three bits more, so to eight times as many.
//
// 1 / rho and share must be between 2^-20 and 2^20, the size of a gain between 2^-40 and 2^16, or 0: then no result
// shows that a product underflowed on the way. An element of h must be below 2^60; where all elements are counted, rho
// is a bound for them.
//
// A bfloat16 is the first half of a float32, so the distance to the next tie is in the second half. The ties of float16
// are in other places: every 2^-24 below 2^-14, and from 65520 on numbers are infinite. There both ends are rounded by
// the processor's own conversion, which knows all that. Rounding keeps the order of numbers, so what is between two ends
// that become the same float16 becomes it, too: a zero with its sign, a subnormal number, or infinity. A number that
// underflows in float32 is a zero in float16, with the sign of the exact one.
#pragma once

#include "statistic.h"

namespace rmsnorm::RMSNORM_LEVEL {

// Roundings of 1 / rho, the gain and two products: each is half a unit in the last place, or one beside a power of two.
constexpr int forward_units = 5;
// Of float16 the two ends are computed, with 1 / rho a little smaller and a little larger, in 2^-24: for the roundings of the
// gain, of its product with h, of the changed 1 / rho and the product with it. Before the gain there are the last two. The
// tenth is for products of errors.
constexpr double half_units = 4.1, half_units_before = 2.1;

RMSNORM_INLINE Float of_f16(Words words) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps((__m256i)words);
#elif defined(__AVX2__)
    return _mm256_cvtph_ps((__m128i)words);
#else
    return vcvt_f32_f16((float16x4_t)words);
#endif
}

// The nearest float16, to even, with its subnormal numbers; infinite from 65520 on.
RMSNORM_INLINE Words to_f16(Float x) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
    return (Words)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
#else
    return (Words)vcvt_f16_f32(x);
#endif
}

template <Format F>
RMSNORM_INLINE Float load_singles(const Stored<F>* from) {
    Float r;
    if constexpr (F == Format::f32) {
        std::memcpy(&r, from, sizeof r);
    } else if constexpr (F == Format::f16) {
        Words words;
        std::memcpy(&words, from, sizeof words);
        r = of_f16(words);
    } else {
#if defined(__AVX512F__)
        __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        r = (Float)_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
#elif defined(__AVX2__)
        __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        r = (Float)_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16);
#else
        Unsigned words;
        for (int i = 0; i < singles; ++i) words[i] = static_cast<std::uint32_t>(from[i]) << 16;
        r = (Float)words;
#endif
    }
    return r;
}

// The nearest bfloat16, to even, of finite numbers that are 0 or above 2^-126; as float32.
RMSNORM_INLINE Float to_bf16(Float x) {
#if defined(__AVX512BF16__)
    return (Float)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)), 16);
#else
    Unsigned word = (Unsigned)x;
    return (Float)((word + 0x7fff + ((word >> 16) & 1)) & 0xffff0000);
#endif
}

// The lower halves of words, to memory.
RMSNORM_INLINE void store_words(std::uint16_t* to, Unsigned word) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)word));
#elif defined(__AVX2__)
    __m256i eight = (__m256i)word;
    __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), words);
#else
    for (int i = 0; i < singles; ++i) to[i] = static_cast<std::uint16_t>(word[i]);
#endif
}

template <Format F>
RMSNORM_INLINE void store_singles(Stored<F>* to, Float x) {
    if constexpr (F == Format::f32) {
        std::memcpy(to, &x, sizeof x);
    } else if constexpr (F == Format::f16) {
        Words words = to_f16(x);
        std::memcpy(to, &words, sizeof words);
    } else {
#if defined(__AVX512BF16__)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
        store_words(to, (Unsigned)to_bf16(x) >> 16);
#endif
    }
}

// The ends of an interval as float16. They are the result if they are equal.
struct Ends {
    Words one, other;

    RMSNORM_INLINE Ends(Float one, Float other) : one(to_f16(one)), other(to_f16(other)) {}
    Words differ() const { return one ^ other; }
};

// A number whose first half is the nearest bfloat16, but for those in the middle between two: they become the larger one.
RMSNORM_INLINE Unsigned half_up(Float x) { return (Unsigned)x + 0x8000; }

// Whether such a number comes from one within so many units of the middle.
RMSNORM_INLINE Word is_near_half(Unsigned up, int units) {
    return (Word)((up + static_cast<std::uint32_t>(units)) & 0xffff) <= 2 * units;
}

// Whether it comes from one below 2^-80 that is not 0. Twice a word has no sign, and 0 has become 0x10000. With `offset`
// the words above 0x10000 and below 2^-80 are the largest integers, so one comparison finds them.
RMSNORM_INLINE Word is_tiny_up(Unsigned up) {
    constexpr std::uint32_t zero = 0x10000, offset = 0x80000000 - (zero + ((127 - 80) << 24));
    return (Word)(up + up + offset) > static_cast<std::int32_t>(zero + offset);
}

// A number that is near no middle, as bfloat16.
RMSNORM_INLINE void store_half_up(std::uint16_t* to, [[maybe_unused]] Float x, [[maybe_unused]] Unsigned up) {
#if defined(__AVX512BF16__)
    store_singles<Format::bf16>(to, x);
#else
    store_words(to, up >> 16);
#endif
}

// Whether a number is below 2^-80 and not 0.
RMSNORM_INLINE Word is_tiny(Float x) {
    Unsigned below = ((Unsigned)x & 0x7fffffff) - 1;  // 0 becomes the largest number
    return (Word)(below < static_cast<std::uint32_t>((127 - 80) << 23));
}

// Whether the two ends of an interval round to different numbers.
RMSNORM_INLINE Word is_split(Float middle, Float error) {
    Unsigned high = ((Unsigned)(middle + error) + 0x8000) >> 16, low = ((Unsigned)(middle - error) + 0x8000) >> 16;
    return (Word)(high != low);
}

// Whether a size is not between 2^-80 and 2^80: 0, infinite or NaN, too.
RMSNORM_INLINE Word is_far_out(Float size) { return ~((size > 0x1p-80f) & (size < 0x1p80f)); }

// What a loop calls rarely: it is not a part of the loop, and gets a copy as in `call_once`.
template <class Body>
[[gnu::noinline, gnu::cold]] void call_rarely(Body body, std::int64_t from, std::int64_t to) {
    body(from, to);
}

// Calls body(j) for each register of n elements. The last one may have elements of the one before, which are written again;
// a row that is shorter than a register is left to few(from, to).
template <class Body, class Few>
[[gnu::flatten]] RMSNORM_INLINE void by_registers(std::int64_t n, Body body, Few few) {
    std::int64_t j = 0;
    for (; j + singles <= n; j += singles) body(j);
    if (j == n) return;
    if (n < singles) return call_rarely(few, j, n);
    call_once(body, n - singles);
}

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

// h = x + residual, rounded once to the format of x.
//
// The sum of two float32 or of two 16-bit numbers is taken in float32. A second rounding, to 16 bits, changes nothing:
// float32 has 24 bits, and twice the 11 bits of float16 and two more are 24. Source: Figueroa 1995, "When is double
// rounding innocuous?". Sums that are subnormal numbers are exact. Many sums of 16-bit numbers are in the middle
// between two of the format; rounding from float64 by way of float32 would take each of them for a doubt.
template <Format X>
[[gnu::noinline]] void add_rows(const Stored<X>* x, const Stored<X>* residual, Stored<X>* h, std::int64_t n) {
    std::int64_t first = 0;
    for (; first + singles <= n; first += singles) {
        store_nearest<X>(h + first, load_singles<X>(x + first) + load_singles<X>(residual + first));
    }
    by_eights(n - first, [=](std::int64_t j, auto count) RMSNORM_BODY {
        j += first;
        store<X>(h + j, load<X>(x + j, count) + load<X>(residual + j, count), count);
    });
}

}  // namespace rmsnorm::RMSNORM_LEVEL
