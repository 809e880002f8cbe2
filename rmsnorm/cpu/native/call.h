// What a kernel knows of a call: its options, and the arrays in memory. Python's Call and plan are written into these.
//
//     y = h / rho * (o + scale) + bias,    h = x + residual
//
// A row has `groups` groups of n elements, each with a statistic of its own. Along it every parameter serves `spread`
// elements, then comes the next one, and after the last one the first again. Rows of residual, y, h, dy, dh, dx and dgate
// follow each other without a gap. A pointer is null where there is no such array, steps are bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rmsnorm {

enum class Format : std::uint8_t { none, f16, bf16, f32, f64 };
enum class Position : std::uint8_t { inside, outside, clamp };  // of eps
enum class Function : std::uint8_t { none, silu, sigmoid };     // of a gate

constexpr std::int64_t size_of(Format format) {
    constexpr std::int64_t sizes[] = {0, 2, 2, 4, 8};
    return sizes[static_cast<int>(format)];
}

struct Call {
    std::int64_t rows;
    std::int64_t n;         // elements of a group
    std::int64_t k;         // of these, how many from the first enter the statistic
    std::int64_t groups;    // in a row
    std::int64_t features;  // how many gains there are, and how many biases
    std::int64_t spread;    // neighbours that share one of them
    std::int64_t step;      // rows of a task of the backward pass: it depends on the shape alone
    double eps;
    double offset;  // o of the gain o + scale
    Position position;
    Format x, y;
    Format norm, product;  // to which h / rho, and products with the parameters, are rounded; none: only y is rounded
    Format scale, bias, gate;
    Function function;
    bool gate_before;  // whether h is multiplied by f(z), and not y

    std::int64_t width() const { return n * groups; }  // elements of a row
    bool has_own() const { return spread == 1 && features == width(); }  // parameters of its own for every element
    // How many doubles `prepare` writes: the gains, the biases, whether the gains are moderate, and the gains in float32.
    std::int64_t parameters() const { return 2 * features + 1 + (features + 1) / 2; }
};

struct Mask {
    const std::uint8_t* data;
    std::int64_t step, stride;  // to the next row and the next element
};

struct Forward {
    const std::byte* x;
    std::int64_t x_step;
    const std::byte *residual, *scale, *bias;
    Mask mask;
    std::byte *y, *h;  // y is null where only h and 1 / rho are wanted
    double* inverse_rms;
    const std::byte* gate;
    std::int64_t gate_step;
};

struct Backward {
    const std::byte* h;
    std::int64_t h_step;
    const std::byte *scale, *bias;  // the bias counts with a gate after the norm
    Mask mask;
    const double* inverse_rms;
    const std::byte *dy, *dh;
    std::byte *dx, *dscale, *dbias, *dgate;
    const std::byte* gate;
    std::int64_t gate_step;
};

// The functions of one level of processors. They compute the rows from `first` to before `last`.
struct Kernels {
    const char* level;
    // Reads the gains o + scale, rounded where the variant rounds, and the biases: Call::parameters() doubles.
    void (*prepare)(const Call&, const std::byte* scale, const std::byte* bias, bool is_backward, double* parameters);
    // False if memory is short.
    bool (*forward)(const Call&, const Forward&, const double* parameters, std::int64_t first, std::int64_t last);
    // `sums`: twice the features, to which the sums over these rows for dscale and dbias are written.
    bool (*backward)(
        const Call&, const Backward&, const double* parameters, double* sums, std::int64_t first, std::int64_t last);
    // Adds `count` pairs of such sums, from the first to the last, and writes them, rounded once, to dscale and dbias.
    void (*finish)(const Call&, const Backward&, double* sums, std::int64_t count);
};

const Kernels* kernels_v3();       // x86-64 with AVX2 and FMA; null in a build that lacks the level
const Kernels* kernels_v4();       // with AVX-512
const Kernels* kernels_v4_bf16();  // with AVX-512 that rounds to bfloat16
const Kernels* kernels_arm64();

}  // namespace rmsnorm
