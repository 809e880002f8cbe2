// Numbers as unevaluated sums of two float64, value + error: 106 bits. Source: Dekker 1971; Knuth 1969.
#pragma once

#include <cmath>

namespace rmsnorm {

struct Pair {
    double value = 0, error = 0;
};

inline double finite(double error) { return std::isfinite(error) ? error : 0.0; }

// a + b - total, exactly.
inline double sum_error(double a, double b, double total) {
    double t = total - a;
    return finite((a - (total - t)) + (b - t));
}

inline double product_error(double a, double b, double product) { return finite(std::fma(a, b, -product)); }

inline Pair normalised(double value, double error) {
    double total = value + error;
    return {total, finite(error - (total - value))};
}

inline Pair sum_of(Pair a, Pair b) {
    double total = a.value + b.value;
    return normalised(total, sum_error(a.value, b.value, total) + (a.error + b.error));
}

inline Pair minus(Pair a, Pair b) { return sum_of(a, {-b.value, -b.error}); }

inline Pair product_of(Pair a, Pair b) {
    double product = a.value * b.value;
    return normalised(product, finite(std::fma(a.value, b.value, -product) + (a.value * b.error + a.error * b.value)));
}

inline Pair over(Pair a, Pair b) {
    double quotient = a.value / b.value;
    double rest = std::fma(-quotient, b.value, a.value) + (a.error - quotient * b.error);
    return {quotient, finite(rest / b.value)};
}

}  // namespace rmsnorm
