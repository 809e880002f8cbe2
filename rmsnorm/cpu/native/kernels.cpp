// The kernels of one level of processors. The build compiles this file once for each, with RMSNORM_LEVEL as its name.
#include "backward.h"
#include "forward.h"

namespace rmsnorm {

namespace RMSNORM_LEVEL {

// x and y are not two formats of 16 bits.
template <class Body>
void with_formats(const Call& c, Body body) {
    with_format(c.x, [&]<Format X>() {
        with_format(c.y, [&]<Format Y>() {
            if constexpr (X == Y || X == Format::f32 || Y == Format::f32) body.template operator()<X, Y>();
        });
    });
}

void forward(const Call& c, const Forward& a, const double* parameters, std::int64_t first, std::int64_t last) {
    with_formats(c, [&]<Format X, Format Y>() { forward_rows<X, Y>(c, a, parameters, first, last); });
}

void backward(
    const Call& c, const Backward& a, const double* parameters, double* sums, std::int64_t first, std::int64_t last) {
    if (a.dscale) std::fill_n(sums, c.width(), 0.0);
    if (a.dbias) std::fill_n(sums + c.width(), c.width(), 0.0);
    with_formats(c, [&]<Format X, Format Y>() { backward_rows<X, Y>(c, a, parameters, sums, first, last); });
}

void sum_columns(const Call& c, const Backward& a, double* sums, std::int64_t from, std::int64_t to) {
    if (a.dscale) std::fill(sums + from, sums + to, 0.0);
    if (a.dbias) std::fill(sums + c.width() + from, sums + c.width() + to, 0.0);
    with_formats(c, [&]<Format X, Format Y>() { sum_columns<X, Y>(c, a, sums, from, to); });
}

}  // namespace RMSNORM_LEVEL

#define RMSNORM_JOIN_(a, b) a##b
#define RMSNORM_JOIN(a, b) RMSNORM_JOIN_(a, b)
#define RMSNORM_TEXT_(a) #a
#define RMSNORM_TEXT(a) RMSNORM_TEXT_(a)

const Kernels* RMSNORM_JOIN(kernels_, RMSNORM_LEVEL)() {
    static constexpr Kernels kernels{
        RMSNORM_TEXT(RMSNORM_LEVEL), RMSNORM_LEVEL::prepare, RMSNORM_LEVEL::forward, RMSNORM_LEVEL::backward,
        RMSNORM_LEVEL::sum_columns, RMSNORM_LEVEL::finish,
    };
    return &kernels;
}

}  // namespace rmsnorm
