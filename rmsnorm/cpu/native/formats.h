// The formats of stored numbers: read to float64, rounded once, written. A bfloat16 is the first half of a float32.
#pragma once

#include <type_traits>

#include "call.h"
#include "lanes.h"

namespace rmsnorm::RMSNORM_LEVEL {

template <Format F>
using Stored = std::conditional_t<F == Format::f64, double, std::conditional_t<F == Format::f32, float, std::uint16_t>>;

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class T>
inline const T* as(const std::byte* from) {
    return reinterpret_cast<const T*>(from);
}
template <class T>
inline T* as(std::byte* from) {
    return reinterpret_cast<T*>(from);
}

// One stored number.
template <Format F>
inline double number(Stored<F> stored) {
    if constexpr (F == Format::f16) {
#if defined(__AVX2__)
        return _cvtsh_ss(stored);
#else
        return static_cast<float>(bits<Half>(stored));
#endif
    } else if constexpr (F == Format::bf16) {
        return bits<float>(static_cast<std::uint32_t>(stored) << 16);
    } else {
        return stored;
    }
}

#if defined(__AVX2__)
RMSNORM_INLINE void split(__m256 eight, HalfPart (&single)[parts]) {
#if defined(__AVX512F__)
    single[0] = eight;
#else
    single[0] = _mm256_castps256_ps128(eight), single[1] = _mm256_extractf128_ps(eight, 1);
#endif
}

RMSNORM_INLINE __m256 joined(const HalfPart (&single)[parts]) {
#if defined(__AVX512F__)
    return single[0];
#else
    return _mm256_set_m128(single[1], single[0]);
#endif
}
#endif

RMSNORM_INLINE Part widened(HalfPart single) {
#if defined(__AVX512F__)
    return _mm512_cvtps_pd(single);
#elif defined(__AVX2__)
    return _mm256_cvtps_pd(single);
#else
    return __builtin_convertvector(single, Part);
#endif
}

RMSNORM_INLINE D widened(const HalfPart (&single)[parts]) {
    D r;
    for (int i = 0; i < parts; ++i) r.part[i] = widened(single[i]);
    return r;
}

RMSNORM_INLINE HalfPart to_single(Part wide) {
#if defined(__AVX512F__)
    return _mm512_cvtpd_ps(wide);
#elif defined(__AVX2__)
    return _mm256_cvtpd_ps(wide);
#else
    return __builtin_convertvector(wide, HalfPart);
#endif
}

// Eight numbers from memory, as float32.
template <Format F>
RMSNORM_INLINE void load_narrow(HalfPart (&single)[parts], const Stored<F>* from) {
    if constexpr (F == Format::f32) {
        load_parts(single, from);
    } else {
#if defined(__AVX2__)
#if !defined(__AVX512F__)
        if constexpr (F == Format::f16) {  // four and four, which is faster than to divide eight
            for (int i = 0; i < parts; ++i) {
                single[i] = _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i * native)));
            }
            return;
        }
#endif
        __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        __m256 eight = F == Format::f16 ? _mm256_cvtph_ps(words)
                                        : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
        split(eight, single);
#else
        float eight[lanes];
        for (int i = 0; i < lanes; ++i) eight[i] = static_cast<float>(number<F>(from[i]));
        std::memcpy(single, eight, sizeof single);
#endif
    }
}

// Eight numbers from memory, as float64.
template <Format F>
RMSNORM_INLINE D load(const Stored<F>* from) {
    if constexpr (F == Format::f64) {
        return load_plain(from);
    } else {
        HalfPart single[parts];
        load_narrow<F>(single, from);
        return widened(single);
    }
}

// The numbers that `rounded` needs for a format. Its step is 1.5 * 2^52 times the unit in the last place of 1.
struct Grid {
    std::uint64_t up;  // what is added to the bits of a power of two
    double least;     // that step for subnormal numbers
    double overflow;  // where numbers become infinite
};

constexpr Grid grid_of(Format format) {
    // bits of 1.5 * 2^(52 - p) less those of 1: the exponents differ by 52 - p, and half of a significand is added
    auto up = [](int p) { return (static_cast<std::uint64_t>(52 - p) << 52) + (std::uint64_t{1} << 51); };
    if (format == Format::f16) return {up(10), 1.5 * 0x1p52 * 0x1p-24, 0x1p16};
    if (format == Format::bf16) return {up(7), 1.5 * 0x1p52 * 0x1p-133, 0x1p128};
    return {up(23), 1.5 * 0x1p52 * 0x1p-149, 0x1p128};
}

// A number that is so large that the last place of its sum with x is that of the format.
template <Format F>
RMSNORM_INLINE Part large_beside(Part x) {
    constexpr Grid grid = grid_of(F);
    Part large = (Part)(((Naturals)x & 0x7ff0000000000000) + grid.up);  // infinity's is negative
    return large < grid.least ? all(grid.least) : large;
}

// A number rounded once to a format, to nearest even, also among its subnormal numbers.
//
// A large number is added and subtracted again.
template <Format F>
RMSNORM_INLINE D rounded(D d) {
    if constexpr (F == Format::none || F == Format::f64) {
        return d;
    } else if constexpr (F == Format::f32) {
        HalfPart single[parts];
        for (int i = 0; i < parts; ++i) single[i] = to_single(d.part[i]);
        return widened(single);
    } else {
        constexpr Grid grid = grid_of(F);
        for (auto& x : d.part) {
            Part large = large_beside<F>(x), near = (x + large) - large;
            near = (Part)(((Bits)near & 0x7fffffffffffffff) | ((Bits)x & std::int64_t(0x8000000000000000)));
            Part size = (Part)((Bits)near & 0x7fffffffffffffff);
            x = size < grid.overflow ? near : x * HUGE_VAL;
        }
        return d;
    }
}

// Whether the two ends of an interval round to different numbers of a format, or have two signs, or are NaN.
template <Format F>
RMSNORM_INLINE Marked is_split(const D& middle, const D& error) {
    Marked marks;
    for (int i = 0; i < parts; ++i) {
        Part x = middle.part[i], e = error.part[i], large = large_beside<F>(x);
        Part size = (Part)((Bits)x & 0x7fffffffffffffff);
        marks.part[i] = (((x - e) + large) != ((x + e) + large)) | (size < e);
    }
    return marks;
}

RMSNORM_INLINE D rounded(D d, Format format) {
    switch (format) {
        case Format::f16: return rounded<Format::f16>(d);
        case Format::bf16: return rounded<Format::bf16>(d);
        case Format::f32: return rounded<Format::f32>(d);
        default: return d;
    }
}

// Eight float32 that are numbers of a shorter format, to memory.
template <Format F>
RMSNORM_INLINE void store_exact(std::uint16_t* to, const HalfPart (&single)[parts]) {
#if defined(__AVX2__)
    __m256 eight = joined(single);
    __m128i words;
    if constexpr (F == Format::f16) {
        words = _mm256_cvtps_ph(eight, _MM_FROUND_TO_NEAREST_INT);
    } else {
        __m256i halves = _mm256_srli_epi32(_mm256_castps_si256(eight), 16);
        words = _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), words);
#else
    float eight[lanes];
    std::memcpy(eight, single, sizeof eight);
    for (int i = 0; i < lanes; ++i) {
        if constexpr (F == Format::f16) {
            to[i] = bits<std::uint16_t>(static_cast<Half>(eight[i]));
        } else {
            to[i] = static_cast<std::uint16_t>(bits<std::uint32_t>(eight[i]) >> 16);
        }
    }
#endif
}

// Numbers of float64 rounded once. It is not inlined, as it is rare.
template <Format F>
[[gnu::noinline, gnu::cold]] HalfPart rounded_again(Part part) {
    D d;
    for (auto& own : d.part) own = part;
    return to_single(rounded<F>(d).part[0]);
}

// Whether a number below 2^-14 is in the middle between two of float16, which are 2^-24 apart there.
RMSNORM_INLINE HalfBits is_middle_of_subnormals(HalfPart x) {
    HalfPart rest = x - ((x + 0.75f) - 0.75f);  // of 0.75 that is the last place
    return (HalfBits)(((HalfNaturals)rest & 0x7fffffff) == (127 - 25) << 23);
}

// Eight numbers to memory, each rounded once.
//
// To 16 bits they go by float32. Two roundings are not one only if the first makes a number that is in the middle between
// two of the format. Such numbers are rounded from float64 again, and so are NaN.
template <Format F>
RMSNORM_INLINE void store(Stored<F>* to, const D& d) {
    if constexpr (F == Format::f64) {
        store_plain(to, d);
    } else {
        HalfPart single[parts];
        for (int i = 0; i < parts; ++i) single[i] = to_single(d.part[i]);
        if constexpr (F == Format::f32) {
            store_parts(to, single);
        } else {
#if defined(__AVX512BF16__)
            if constexpr (F == Format::bf16) {  // the processor's own conversion takes subnormal numbers for 0
                __m256i rest = _mm256_slli_epi32((__m256i)single[0], 16);
                int doubt = _mm256_cmpeq_epi32_mask(rest, _mm256_set1_epi32(INT32_MIN)) |
                            _mm256_fpclass_ps_mask(single[0], 0x20);
                if (!doubt) [[likely]] {
                    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), (__m128i)_mm256_cvtneps_pbh(single[0]));
                } else {
                    single[0] = rounded_again<F>(d.part[0]);
                    store_exact<F>(to, single);
                }
                return;
            }
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
            if constexpr (F == Format::bf16) {  // both halves at once
                Unsigned word = (Unsigned)joined(single), size = word & 0x7fffffff;
                if (any((Word)(((word & 0xffff) == 0x8000) | (size > 0x7f800000)))) [[unlikely]] {
                    for (int i = 0; i < parts; ++i) single[i] = rounded_again<F>(d.part[i]);
                } else {
                    split((__m256)(word + 0x7fff + ((word >> 16) & 1)), single);
                }
                return store_exact<F>(to, single);
            }
#endif
            HalfBits doubt{};
            for (auto& x : single) {
                HalfNaturals word = (HalfNaturals)x, size = word & 0x7fffffff;
                if constexpr (F == Format::f16) {
                    HalfBits small = (size < (127 - 14) << 23) & (size != 0);
                    doubt |= ((word & 0x1fff) == 0x1000) | (size > 0x7f800000);
                    if (any(small)) doubt |= is_middle_of_subnormals(x);
                } else {
                    doubt |= ((word & 0xffff) == 0x8000) | (size > 0x7f800000);
                    x = (HalfPart)(word + 0x7fff + ((word >> 16) & 1));
                }
            }
            if (any(doubt)) [[unlikely]] {
                for (int i = 0; i < parts; ++i) single[i] = rounded_again<F>(d.part[i]);
            }
            store_exact<F>(to, single);
        }
    }
}

// The same of less than eight numbers: the others are 0, and are not written.
template <class T>
inline void copy_first(T* to, const T* from, int count) {
    if (count & 4) {
        std::memcpy(to, from, 4 * sizeof(T));
        to += 4, from += 4;
    }
    if (count & 2) {
        std::memcpy(to, from, 2 * sizeof(T));
        to += 2, from += 2;
    }
    if (count & 1) *to = *from;
}

template <Format F>
RMSNORM_INLINE D load_first(const Stored<F>* from, int count) {
#if defined(__AVX512F__)
    __mmask8 mask = static_cast<__mmask8>((1 << count) - 1);
    D r;
    if constexpr (F == Format::f64) {
        r.part[0] = _mm512_maskz_loadu_pd(mask, from);
    } else if constexpr (F == Format::f32) {
        r.part[0] = _mm512_cvtps_pd(_mm256_maskz_loadu_ps(mask, from));
    } else {
        __m128i words = _mm_maskz_loadu_epi16(mask, from);
        __m256 single = F == Format::f16 ? _mm256_cvtph_ps(words)
                                         : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
        r.part[0] = _mm512_cvtps_pd(single);
    }
    return r;
#else
    Stored<F> eight[lanes] = {};
    copy_first(eight, from, count);
    return load<F>(eight);
#endif
}

template <Format F>
RMSNORM_INLINE void store_first(Stored<F>* to, D d, int count) {
    Stored<F> eight[lanes];
    store<F>(eight, d);
    copy_first(to, eight, count);
}

// One function for a format that is known when it runs, not float64: `body` gets it as a constant.
template <class Body>
inline auto with_format(Format format, Body body) {
    switch (format) {
        case Format::f16: return body.template operator()<Format::f16>();
        case Format::bf16: return body.template operator()<Format::bf16>();
        default: return body.template operator()<Format::f32>();
    }
}

}  // namespace rmsnorm::RMSNORM_LEVEL
