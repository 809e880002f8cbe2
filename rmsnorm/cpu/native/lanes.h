// Eight numbers at a time. Every level of processors has eight lanes of float64, in one, two or four registers, so that
// sums are added in one order everywhere. Elements of float32 alone have as many lanes as a register holds.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// For what takes or returns registers: a call would pass them through memory.
#define RMSNORM_INLINE [[gnu::always_inline]] inline
// The same for the body of a loop, a lambda.
#define RMSNORM_BODY __attribute__((always_inline))

namespace rmsnorm::RMSNORM_LEVEL {

#if defined(__AVX512F__)
constexpr int native = 8;  // lanes of float64 in a register
#elif defined(__AVX2__)
constexpr int native = 4;
#else
constexpr int native = 2;
typedef __fp16 Half;  // in C++ g++ 12 has no _Float16 for arm64
#endif
constexpr int lanes = 8;
constexpr int parts = lanes / native;

typedef double Part __attribute__((vector_size(8 * native)));
typedef std::int64_t Bits __attribute__((vector_size(8 * native)));
typedef std::uint64_t Naturals __attribute__((vector_size(8 * native)));
typedef float HalfPart __attribute__((vector_size(4 * native)));
typedef std::int32_t HalfBits __attribute__((vector_size(4 * native)));
typedef std::uint32_t HalfNaturals __attribute__((vector_size(4 * native)));

struct D {
    Part part[parts];
};

struct Marked {
    Bits part[parts];
};

#define RMSNORM_OPERATOR(op)                                          \
    RMSNORM_INLINE D operator op(D a, D b) {                          \
        D r;                                                          \
        for (int i = 0; i < parts; ++i) r.part[i] = a.part[i] op b.part[i]; \
        return r;                                                     \
    }
RMSNORM_OPERATOR(+)
RMSNORM_OPERATOR(-)
RMSNORM_OPERATOR(*)
#undef RMSNORM_OPERATOR

RMSNORM_INLINE Part all(double number) { return number - Part{}; }  // also of -0

RMSNORM_INLINE D all_lanes(double number) {
    D r;
    for (int i = 0; i < parts; ++i) r.part[i] = all(number);
    return r;
}

RMSNORM_INLINE Part fma(Part a, Part b, Part c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_pd(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_pd(a, b, c);
#else
    return vfmaq_f64(c, a, b);
#endif
}

// a * b + c in one rounding.
RMSNORM_INLINE D fma(D a, D b, D c) {
    D r;
    for (int i = 0; i < parts; ++i) r.part[i] = fma(a.part[i], b.part[i], c.part[i]);
    return r;
}

// Registers go to and from memory one by one: a copy of them all would pass through memory once more.
template <class Register, class T>
RMSNORM_INLINE void load_parts(Register (&parts_)[parts], const T* from) {
    for (int i = 0; i < parts; ++i) std::memcpy(&parts_[i], from + i * native, sizeof(Register));
}

template <class Register, class T>
RMSNORM_INLINE void store_parts(T* to, const Register (&parts_)[parts]) {
    for (int i = 0; i < parts; ++i) std::memcpy(to + i * native, &parts_[i], sizeof(Register));
}

RMSNORM_INLINE D load_plain(const double* from) {
    D r;
    load_parts(r.part, from);
    return r;
}

RMSNORM_INLINE void store_plain(double* to, const D& d) { store_parts(to, d.part); }

RMSNORM_INLINE D magnitude(D d) {
    for (auto& part : d.part) part = (Part)((Bits)part & 0x7fffffffffffffff);
    return d;
}

// The order in which every sum of a row ends: of the lanes i and i + 4, then i and i + 2, then the last two.
inline double sum_of_lanes(D d) {
    double x[lanes];
    store_plain(x, d);
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

// A sum of a row: element j is in lane j % 8 of accumulator j / 8 % 4; see `sum_over`.
struct Sum {
    D total[4] = {};

    double value() const { return sum_of_lanes((total[0] + total[1]) + (total[2] + total[3])); }
};

typedef float Float __attribute__((vector_size(8 * native)));
typedef std::int32_t Word __attribute__((vector_size(8 * native)));
typedef std::uint32_t Unsigned __attribute__((vector_size(8 * native)));
typedef std::uint16_t Words __attribute__((vector_size(4 * native)));
constexpr int singles = 2 * native;  // lanes of float32 in a register

RMSNORM_INLINE Float all_singles(float number) { return number - Float{}; }
RMSNORM_INLINE Float magnitude(Float x) { return (Float)((Word)x & 0x7fffffff); }

RMSNORM_INLINE Float fma(Float a, Float b, Float c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return vfmaq_f32(c, a, b);
#endif
}

RMSNORM_INLINE bool any(Word marks) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)marks) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)marks) != 0;
#else
    return vmaxvq_u32((uint32x4_t)marks) != 0;
#endif
}

RMSNORM_INLINE bool any(Words marks) {
#if defined(__AVX512F__)
    return !_mm256_testz_si256((__m256i)marks, (__m256i)marks);
#elif defined(__AVX2__)
    return !_mm_testz_si128((__m128i)marks, (__m128i)marks);
#else
    return (std::uint64_t)marks != 0;
#endif
}

RMSNORM_INLINE bool any(HalfBits marks) {
#if defined(__AVX512F__)
    return _mm256_movemask_ps((__m256)marks) != 0;
#elif defined(__AVX2__)
    return _mm_movemask_ps((__m128)marks) != 0;
#else
    std::int32_t all = 0;
    for (int i = 0; i < native; ++i) all |= marks[i];
    return all != 0;
#endif
}

RMSNORM_INLINE bool any(Bits marks) {
#if defined(__AVX512F__)
    return _mm512_movepi64_mask((__m512i)marks) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_pd((__m256d)marks) != 0;
#else
    std::int64_t all = 0;
    for (int i = 0; i < native; ++i) all |= marks[i];
    return all != 0;
#endif
}

}  // namespace rmsnorm::RMSNORM_LEVEL
