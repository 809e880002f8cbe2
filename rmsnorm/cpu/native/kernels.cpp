// The kernels of one level of processors. The build compiles this file once for each, with RMSNORM_LEVEL as its name.
#include "general.h"
#include "plain.h"

namespace rmsnorm {

namespace RMSNORM_LEVEL {

// Whether a row is read to float64 before anything else.
bool needs_rows(const Call& c, const Mask& mask) {
    return mask.data || c.x == Format::f64 || c.y == Format::f64;
}

bool forward(const Call& c, const Forward& a, const double* parameters, std::int64_t first, std::int64_t last) {
    if (needs_rows(c, a.mask)) return forward_general(c, a, parameters, first * c.groups, last * c.groups);
    return with_narrow(c.x, [&]<Format X>() {
        return with_narrow(c.y, [&]<Format Y>() { return forward_plain<X, Y>(c, a, parameters, first, last); });
    });
}

bool backward(
    const Call& c, const Backward& a, const double* parameters, double* sums, std::int64_t first, std::int64_t last) {
    std::fill_n(sums, a.dbias ? 2 * c.features : c.features, 0.0);
    if (needs_rows(c, a.mask) || c.scale == Format::f64)
        return backward_general(c, a, parameters, sums, first * c.groups, last * c.groups);
    if (a.gate) return backward_gated(c, a, parameters, sums, first, last);
    return with_narrow(c.x, [&]<Format X>() {
        return with_narrow(c.y, [&]<Format Y>() { return backward_plain<X, Y>(c, a, parameters, sums, first, last); });
    });
}

}  // namespace RMSNORM_LEVEL

#define RMSNORM_JOIN_(a, b) a##b
#define RMSNORM_JOIN(a, b) RMSNORM_JOIN_(a, b)
#define RMSNORM_TEXT_(a) #a
#define RMSNORM_TEXT(a) RMSNORM_TEXT_(a)

const Kernels* RMSNORM_JOIN(kernels_, RMSNORM_LEVEL)() {
    static constexpr Kernels kernels{
        RMSNORM_TEXT(RMSNORM_LEVEL), RMSNORM_LEVEL::prepare, RMSNORM_LEVEL::forward, RMSNORM_LEVEL::backward,
        RMSNORM_LEVEL::finish,
    };
    return &kernels;
}

}  // namespace rmsnorm
