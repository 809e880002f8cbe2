// What a kernel knows of a call: its options, and the arrays in memory. Python's Call and plan are written into these.
//
//     y = h / rho * (o + scale) + bias,    h = x + residual
//
// A row has `groups` groups of n elements, each with a statistic of its own, and a gain and a bias for each element. Rows of
// residual, y, h, dy, dh and dx follow each other without a gap. A pointer is null where there is no such array, steps are
// bytes. Arrays are float16, bfloat16 or float32; float64 are the numbers inside, and 1 / rho.
#pragma once

#include <cstddef>
#include <cstdint>

#include "threads.h"

namespace rmsnorm {

enum class Format : std::uint8_t { none, f16, bf16, f32, f64 };
enum class Position : std::uint8_t { inside, outside, clamp };  // of eps

constexpr std::int64_t size_of(Format format) {
    constexpr std::int64_t sizes[] = {0, 2, 2, 4, 8};
    return sizes[static_cast<int>(format)];
}

struct Call {
    std::int64_t rows;
    std::int64_t n;         // elements of a group
    std::int64_t k;         // of these, how many from the first enter the statistic
    std::int64_t groups;    // in a row
    std::int64_t step;      // rows of a task of the backward pass: it depends on the shape alone
    double eps;
    double offset;  // o of the gain o + scale
    Position position;
    Format x, y;
    Format norm, product;  // to which h / rho, and products with the parameters, are rounded; none: only y is rounded
    Format scale, bias;

    std::int64_t width() const { return n * groups; }  // elements of a row; as many gains, and biases
    // How many doubles `prepare` writes: the gains, the biases, whether the gains are moderate, and the gains in float32.
    std::int64_t parameters() const { return 2 * width() + 1 + (width() + 1) / 2; }
};

struct Forward {
    const std::byte* x;
    std::int64_t x_step;
    const std::byte *residual, *scale, *bias;
    std::byte *y, *h;
    double* inverse_rms;
};

struct Backward {
    const std::byte* h;
    std::int64_t h_step;
    const std::byte* scale;
    const double* inverse_rms;  // null: it is computed again
    const std::byte *dy, *dh;
    std::byte *dx, *dscale, *dbias;
    double* found;  // null, or where each 1 / rho is written
};

// The functions of one level of processors. They compute the rows from `first` to before `last`.
struct Kernels {
    const char* level;
    // Reads the gains o + scale, rounded where the variant rounds, and the biases: Call::parameters() doubles.
    void (*prepare)(const Call&, const std::byte* scale, const std::byte* bias, bool is_backward, double* parameters);
    void (*forward)(const Call&, const Forward&, const double* parameters, std::int64_t first, std::int64_t last);
    // `sums`: twice the width, to which the sums over these rows for dscale and dbias are written.
    void (*backward)(
        const Call&, const Backward&, const double* parameters, double* sums, std::int64_t first, std::int64_t last);
    // The same sums over all rows of one task, for the elements `from` to `to` of a row. It needs `inverse_rms`.
    void (*sum_columns)(const Call&, const Backward&, double* sums, std::int64_t from, std::int64_t to);
    // Adds `count` pairs of such sums, from the first to the last, and writes them, rounded once, to dscale and dbias.
    void (*finish)(const Call&, const Backward&, double* sums, std::int64_t count);
};

const Kernels* kernels_v3();       // x86-64 with AVX2 and FMA; null in a build that lacks the level
const Kernels* kernels_v4();       // with AVX-512
const Kernels* kernels_v4_bf16();  // with AVX-512 that rounds to bfloat16
const Kernels* kernels_arm64();

// Those of the best level that this processor has, or null. The environment variable RMSNORM_CPU_LEVEL, one of v3, v4,
// v4-bf16 and arm64, asks for another level; null if the processor or the build lacks that. It is read once.
const Kernels* kernels();

// Compute a call where there are kernels. No bit of a result depends on the threads. False if memory is short.
bool forward(const Call& call, const Forward& arrays, const Pool& pool);
bool backward(const Call& call, const Backward& arrays, const Pool& pool);

}  // namespace rmsnorm
