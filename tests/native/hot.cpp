// The loops that take the time of most calls, and nothing else: tests/nightly/test_loops.py reads what a compiler made of
// them.
#include "backward.h"
#include "forward.h"

namespace rmsnorm::RMSNORM_LEVEL {

using Short = std::uint16_t;
constexpr Format f16 = Format::f16, bf16 = Format::bf16, f32 = Format::f32;

template double sum_of_squares<f32>(const float*, std::int64_t);
template double sum_of_squares<bf16>(const Short*, std::int64_t);
template double sum_of_squares<f16>(const Short*, std::int64_t);
template void fill<f32, f32>(
    const Call&, const float*, const double*, const double*, Quotient, float*, std::int64_t, std::int64_t);
template void row_of_y<bf16, bf16>(const Call&, const Group&, bool, const Short*, double, Short*);
template void row_of_y<f16, f16>(const Call&, const Group&, bool, const Short*, double, Short*);
template void gradients_of_row<f32, f32>(
    const Call&, const Group&, bool, const float*, const float*, const float*, double, float*);
template void gradients_of_row<bf16, bf16>(
    const Call&, const Group&, bool, const Short*, const Short*, const Short*, double, Short*);
template void gradients_of_row<f16, f16>(
    const Call&, const Group&, bool, const Short*, const Short*, const Short*, double, Short*);
template void add_to_dscale<bf16, bf16>(const Short*, const Short*, double, double*, std::int64_t);

}  // namespace rmsnorm::RMSNORM_LEVEL
