// bfloat16 rows in float32 arithmetic, which is several times as fast, with the bits of float64 arithmetic.
//
// The sums were computed in float64 before. What is left has so few roundings that their errors are bounded by a few
// 2^-24 of the terms: if both ends of that interval round to the same bfloat16, so does the exact result. Else, which
// happens to one element in some thousands, or if an element is out of range, a register is computed again in float64.
// 1 / rho and share must be between 2^-20 and 2^20, the size of a gain between 2^-40 and 2^16, or 0: then no result
// shows that a product underflowed on the way. An element of h must be below 2^60; where all elements are counted, rho
// is a bound for them.
#pragma once

#include "statistic.h"

namespace rmsnorm::RMSNORM_LEVEL {

// Roundings of 1 / rho, the gain and two products: each is half a unit in the last place, or one beside a power of two.
constexpr int forward_units = 5;
// With a gate also five units of f(z) (see gate.h), its product, and one for products of errors.
constexpr int gated_units = 12;

template <Format F>
RMSNORM_INLINE Float load_singles(const Stored<F>* from) {
    Float r;
    if constexpr (F == Format::f32) {
        std::memcpy(&r, from, sizeof r);
    } else if constexpr (F == Format::f16) {
#if defined(__AVX512F__)
        r = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
        r = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
        for (int i = 0; i < singles; ++i) r[i] = static_cast<float>(bits<Half>(from[i]));
#endif
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
    } else {
#if defined(__AVX512BF16__)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
        store_words(to, (Unsigned)to_bf16(x) >> 16);
#endif
    }
}

// Whether the part that rounding to bfloat16 cuts off is within so many units of one half.
RMSNORM_INLINE Word is_near(Float x, int units) {
    Unsigned rest = ((Unsigned)x & 0xffff) - static_cast<std::uint32_t>(0x8000 - units);
    return (Word)(rest <= static_cast<std::uint32_t>(2 * units));
}

// Whether a number is below 2^-80 and not 0.
RMSNORM_INLINE Word is_tiny(Float x) {
    Unsigned below = ((Unsigned)x & 0x7fffffff) - 1;  // 0 becomes the largest number
    return (Word)(below < static_cast<std::uint32_t>((127 - 80) << 23));
}

// Whether it is below 2^-80, also 0: for where the exact number may have been multiplied by more than 1 after it underflowed.
RMSNORM_INLINE Word is_tiny_or_zero(Float x) { return magnitude(x) < 0x1p-80f; }

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

}  // namespace rmsnorm::RMSNORM_LEVEL
