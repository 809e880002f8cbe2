// Two kernels, one of which is wrong, judged by files of vectors/:
//
//     c++ -std=c++17 -O2 -o judge examples/vectors/kernel.cpp
//     ./judge right vectors/llama.*.txt        prints the count alone
//     ./judge wrong vectors/llama.*.txt        prints a line for each output that is wrong
#include <algorithm>
#include <iostream>
#include <stdexcept>

#include "reader.hpp"

static double rounded(double v, int bits) {  // to nearest, ties to even, in a format of 8, 11 or 24 bits
    if (v == 0 || !std::isfinite(v)) return v;
    const int exponent = std::max(std::ilogb(v) + 1, bits == 11 ? -13 : -125);
    const double step = std::ldexp(1, exponent - bits), result = std::rint(v / step) * step;
    return std::fabs(result) >= std::ldexp(1, bits == 11 ? 16 : 128) ? std::copysign(INFINITY, v) : result;
}

static Array &need(Test &t, const std::string &name) {  // what every test has
    const auto found = t.arrays.find(name);
    if (found == t.arrays.end()) throw std::runtime_error("test " + std::to_string(t.id) + " has no " + name);
    return found->second;
}

static void rms_norm(Test &t, bool eps_outside) {  // an output without values is not judged
    const Array &x = need(t, "x"), &scale = need(t, "scale");
    const bool has_residual = t.arrays.count("residual") > 0;
    Array &y = need(t, "y"), &inverses = need(t, "inverse_rms");
    std::vector<double> row(static_cast<std::size_t>(t.n));
    for (int start = 0; start < x.size; start += t.n) {
        double square = 0;
        for (int j = 0; j < t.n; j++) {
            row[j] = x.values[start + j];
            if (has_residual) row[j] = rounded(row[j] + t.arrays["residual"].values[start + j], x.bits);
            square += row[j] * row[j] / t.n;
        }
        const double inverse = 1 / (eps_outside ? std::sqrt(square) + t.eps : std::sqrt(square + t.eps));
        inverses.values.push_back(static_cast<float>(inverse));
        for (int j = 0; j < t.n; j++) {
            const double normed = t.norm ? rounded(row[j] * inverse, t.norm) : row[j] * inverse;
            const double product = static_cast<float>(normed * (t.offset + static_cast<double>(scale.values[j])));
            y.values.push_back(static_cast<float>(rounded(product, y.bits)));
        }
    }
}

static bool is_wrong(const Array &a) {
    for (std::size_t j = 0; !a.values.empty() && j < a.lo.size(); j++) {
        double sum = 0;  // of one element, where a block has one
        for (int i = 0; i < a.block; i++) sum += (i + 1.0) * a.values[j * a.block + i];
        if (std::isnan(a.lo[j]) ? !std::isnan(sum) : !(a.lo[j] <= sum && sum <= a.hi[j])) return true;
    }
    return false;
}

int main(int count, char **arguments) try {
    const std::string kernel = count > 1 ? arguments[1] : "";
    if (count < 3 || (kernel != "right" && kernel != "wrong"))
        return std::cerr << "usage: " << arguments[0] << " right|wrong vectors/VARIANT.DTYPE.txt ...\n", 2;
    int tests = 0, judged = 0, wrong = 0;
    for (int i = 2; i < count; i++) {
        std::ifstream file(arguments[i]);
        if (!file) throw std::runtime_error(std::string(arguments[i]) + ": it cannot be read");
        std::string kind, what, format, name;
        int left = -1;
        file >> kind >> what >> format >> name >> left;
        Test t;
        for (; format == "1" && left > 0 && next(file, t); left--, tests++) {
            rms_norm(t, kernel == "wrong");
            for (const auto &[quantity, array] : t.arrays) {
                judged += !array.lo.empty() && !array.values.empty();
                if (is_wrong(array) && ++wrong)
                    std::cout << name << ' ' << t.id << ' ' << t.flag << ' ' << quantity << '\n';
            }
        }
        if (left) throw std::runtime_error(std::string(arguments[i]) + ": no vectors in format 1, or cut off");
    }
    std::cerr << tests << " tests, " << judged << " outputs judged, " << wrong << " wrong\n";
    return judged ? wrong > 0 : 2;
} catch (const std::runtime_error &error) {
    return std::cerr << error.what() << '\n', 2;
}
