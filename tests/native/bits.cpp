// The bits of 3,024 calls forward and backward, as one hash, which is the same for every level, compiler and processor.
//
//     make levels
//
// compiles this program with the kernels and runs it for each level; RMSNORM_CPU_LEVEL asks for one. It prints the level and
// the hash of all results. With an argument it prints one hash for each call, to find the first call that differs.
//
// It ends with 1 if the hash is not `expected`, and with 2 if this processor or build lacks the level. A change of what the
// kernels compute, or of the calls below, changes the hash: then every level has to print the same new one.
//
// Inputs come from integers alone, so they are the same everywhere. A NaN is hashed as one number: IEEE 754 leaves its sign
// and payload to the processor.
#include "call.h"

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using namespace rmsnorm;

namespace {

constexpr std::uint64_t expected = 0xdad609d7fef2415d;
constexpr int calls = 27 * 7 * 16;  // formats of x, y and scale, widths, and sixteen of each with other options

// splitmix64. Source: Steele, Lea & Flood 2014.
struct Random {
    std::uint64_t state;

    std::uint64_t next() {
        std::uint64_t z = state += 0x9e3779b97f4a7c15;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }
    int below(int count) { return static_cast<int>(next() % static_cast<std::uint64_t>(count)); }
    int between(int first, int last) { return first + below(last - first + 1); }
    bool one_in(int count) { return below(count) == 0; }
};

// The bits of a format: of the significand without its first one, and the largest exponent.
struct Layout {
    int fraction, top;

    std::uint64_t infinity() const { return static_cast<std::uint64_t>(2 * top + 1) << fraction; }
};

Layout layout_of(Format format) {
    switch (format) {
        case Format::f16: return {10, 15};
        case Format::bf16: return {7, 127};
        case Format::f32: return {23, 127};
        default: return {52, 1023};
    }
}

// (1 + fraction / 2^52) 2^exponent, with a sign. A format cuts it off; what is too large is its largest number.
struct Number {
    bool is_negative = false;
    int exponent = 0;
    std::uint64_t fraction = 0;

    std::uint64_t in(Format format) const {
        const Layout l = layout_of(format);
        const int least = 1 - l.top;
        const std::uint64_t significand = ((std::uint64_t{1} << 52) | fraction) >> (52 - l.fraction);
        const std::uint64_t sign = static_cast<std::uint64_t>(is_negative) << (size_of(format) * 8 - 1);
        if (exponent > l.top) return sign | (l.infinity() - 1);
        if (exponent < least) return sign | (least - exponent > 60 ? 0 : significand >> (least - exponent));
        return sign | ((static_cast<std::uint64_t>(exponent - least) << l.fraction) + significand);
    }
};

// Elements of a format, in memory of their own, so that a sanitizer sees what is read or written beyond.
class Array {
    std::vector<std::byte> bytes;

public:
    Format format = Format::none;

    Array() = default;
    Array(Format format, std::int64_t count) : bytes(count * size_of(format), std::byte{0xff}), format(format) {}  // NaN

    std::byte* data() { return bytes.empty() ? nullptr : bytes.data(); }
    std::int64_t count() const { return bytes.empty() ? 0 : static_cast<std::int64_t>(bytes.size()) / size_of(format); }
    void set(std::int64_t i, std::uint64_t bits) {
        std::byte* to = bytes.data() + i * size_of(format);
        for (std::int64_t b = 0; b < size_of(format); ++b) to[b] = static_cast<std::byte>(bits >> (8 * b));
    }
    std::uint64_t get(std::int64_t i) const {
        const std::byte* from = bytes.data() + i * size_of(format);
        std::uint64_t bits = 0;
        for (std::int64_t b = 0; b < size_of(format); ++b) bits |= static_cast<std::uint64_t>(from[b]) << (8 * b);
        return bits;
    }
};
static_assert(std::endian::native == std::endian::little);

// FNV-1a. Source: Fowler, Noll & Vo, draft-eastlake-fnv.
struct Hash {
    std::uint64_t value = 0xcbf29ce484222325;

    void add(const Array& array) {
        if (!array.count()) return;
        const std::int64_t size = size_of(array.format);
        const std::uint64_t infinity = layout_of(array.format).infinity(), sign = std::uint64_t{1} << (8 * size - 1);
        for (std::int64_t i = 0; i < array.count(); ++i) {
            std::uint64_t bits = array.get(i);
            if ((bits & (sign - 1)) > infinity) bits = infinity + 1;  // NaN
            for (std::int64_t b = 0; b < size; ++b) value = (value ^ (bits >> (8 * b) & 0xff)) * 0x100000001b3;
        }
    }
};

// How the numbers of a row are made.
enum class Kind { normal, heavy, far, zeros, equal, special };

Kind kind_of_row(Random& random) {
    constexpr Kind kinds[] = {Kind::normal, Kind::normal, Kind::normal, Kind::normal, Kind::heavy,
                              Kind::heavy,  Kind::far,    Kind::zeros,  Kind::equal,  Kind::special};
    return kinds[random.below(10)];
}

Number normal(Random& random) {
    const std::uint64_t bits = random.next();
    return {(bits & 1) != 0, 1 - std::countr_zero(random.next() | std::uint64_t{1} << 40), bits >> 12};
}

// Few bits, which every format has, and a size near 1.
Number plain(Random& random) {
    return {random.one_in(2), random.between(-3, 3), static_cast<std::uint64_t>(random.below(16)) << 48};
}

std::uint64_t special(Random& random, Format format) {
    const Layout l = layout_of(format);
    const std::uint64_t sign = static_cast<std::uint64_t>(random.below(2)) << (size_of(format) * 8 - 1);
    switch (random.below(7)) {
        case 0: return sign;
        case 1: return sign | l.infinity();
        case 2: return sign | (l.infinity() + (std::uint64_t{1} << (l.fraction - 1)));      // NaN
        case 3: return sign | (l.infinity() + ((std::uint64_t{1} << l.fraction) - 1));      // another one
        case 4: return sign | (l.infinity() - 1);                                           // the largest number
        case 5: return sign | 1;                                                            // the smallest
        default: return sign | (std::uint64_t{1} << l.fraction);                            // the smallest normal one
    }
}

void fill_row(Random& random, Array& array, std::int64_t first, std::int64_t n, Kind kind) {
    const int top = layout_of(array.format).top;
    const int far = random.one_in(2) ? top - 3 : 3 - top, shift = kind == Kind::far ? far : random.between(-3, 3);
    const int spread = std::min(top, 900);
    const Number same = normal(random);
    for (std::int64_t j = first; j < first + n; ++j) {
        Number number = kind == Kind::equal ? same : normal(random);
        number.exponent += kind == Kind::heavy ? random.between(-spread, spread) : shift;
        std::uint64_t bits = number.in(array.format);
        if (kind == Kind::zeros) bits &= std::uint64_t{1} << (size_of(array.format) * 8 - 1);
        if (kind == Kind::special && random.one_in(16)) bits = special(random, array.format);
        array.set(j, bits);
    }
}

Format promoted(Format a, Format b) {
    if (b == Format::none) return a;
    if (a != b && std::max(a, b) == Format::bf16) return Format::f32;
    return std::max(a, b);
}

// One call in each direction: the i-th.
void compute(int i, Hash& hash) {
    constexpr Format formats[] = {Format::f16, Format::bf16, Format::f32};
    constexpr std::int64_t widths[] = {1, 3, 7, 8, 77, 768, 1000};
    Random random{static_cast<std::uint64_t>(i) * 0x2545f4914f6cdd1d};
    auto any_format = [&] { return formats[random.below(3)]; };

    Call call{};
    call.rows = random.between(1, 11);
    call.n = widths[i / 27 % 7];
    call.k = random.one_in(4) ? random.between(1, static_cast<int>(call.n)) : call.n;
    call.groups = random.one_in(4) ? random.between(2, 3) : 1;
    call.step = random.one_in(2) ? call.rows : random.between(1, static_cast<int>(call.rows));
    constexpr double epses[] = {1e-6, 1e-5, 0.0, 1e-3, 1e-8, 1e-310, 1e-170};
    call.eps = epses[random.below(7)];
    constexpr double offsets[] = {0.0, 0.0, 1.0, 0.5};
    call.offset = offsets[random.below(4)];
    call.position = static_cast<Position>(random.below(3));
    call.x = formats[i % 3], call.y = formats[i / 3 % 3], call.scale = formats[i / 9 % 3];
    if (call.x != Format::f32 && call.y != Format::f32) call.y = call.x;  // there are no kernels for both formats of 16 bits
    if (random.one_in(8)) call.scale = Format::none;
    if (random.one_in(4)) call.bias = any_format();
    if (random.one_in(2)) {
        call.product = promoted(promoted(call.x, call.scale), call.bias);
        call.norm = random.one_in(4) ? call.product : call.x;
    }
    const bool has_residual = random.one_in(4);
    const bool is_along = random.one_in(6);  // whether rows of dy gain are along h

    const std::int64_t n = call.n, width = call.width(), rows = call.rows;
    const std::int64_t gap = random.one_in(4) ? random.between(1, 5) : 0;  // elements between rows of x
    Array x(call.x, rows * (width + gap)), residual, scale, bias, dy(call.y, rows * width), dh;
    if (call.scale != Format::none) scale = Array(call.scale, width);
    if (call.bias != Format::none) bias = Array(call.bias, width);
    if (has_residual) residual = Array(call.x, rows * width);
    if (random.one_in(4)) dh = Array(call.x, rows * width);

    std::vector<int> powers(width);  // of the gain, where rows are along
    if (scale.data()) {
        fill_row(random, scale, 0, width, random.one_in(2) ? Kind::normal : kind_of_row(random));
        for (std::int64_t j = 0; j < width && is_along; ++j) {
            powers[j] = random.between(-2, 2);
            scale.set(j, Number{false, powers[j], 0}.in(call.scale));
        }
    }
    if (bias.data()) fill_row(random, bias, 0, width, random.one_in(2) ? Kind::normal : kind_of_row(random));
    for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t g = 0; g < call.groups; ++g) {
            const std::int64_t here = r * width + g * n, apart = r * (width + gap) + g * n;
            fill_row(random, x, apart, n, kind_of_row(random));
            fill_row(random, dy, here, n, kind_of_row(random));
            if (has_residual) fill_row(random, residual, here, n, kind_of_row(random));
            if (dh.data()) fill_row(random, dh, here, n, kind_of_row(random));
            if (!is_along) continue;
            const int power = random.between(-2, 2);
            const bool is_sparse = random.one_in(4), is_exact = !random.one_in(4);
            for (std::int64_t j = 0; j < n; ++j) {
                Number number = plain(random);
                const bool is_zero = is_sparse && !random.one_in(8);
                x.set(apart + j, is_zero ? 0 : number.in(call.x));
                if (has_residual) residual.set(here + j, 0);
                number.exponent += power - powers[g * n + j];
                if (!is_exact && random.one_in(4)) number.fraction ^= std::uint64_t{1} << 45;
                dy.set(here + j, is_zero ? 0 : number.in(call.y));
            }
        }
    }

    const Pool pool{random.one_in(8) ? 2 : 1};
    auto check = [](bool has_memory) {
        if (!has_memory) std::exit(3);
    };
    Array y, h, inverse_rms, dx, dscale, dbias;
    y = Array(call.y, rows * width);
    if (has_residual) h = Array(call.x, rows * width);
    if (random.one_in(2)) inverse_rms = Array(Format::f64, rows * call.groups);
    const std::int64_t x_step = (width + gap) * size_of(call.x);
    check(rmsnorm::forward(call, Forward{
        .x = x.data(), .x_step = x_step, .residual = residual.data(), .scale = scale.data(), .bias = bias.data(),
        .y = y.data(), .h = h.data(), .inverse_rms = reinterpret_cast<double*>(inverse_rms.data()),
    }, pool));
    for (const Array* array : {&y, &h, &inverse_rms}) hash.add(*array);

    if (!random.one_in(16)) dx = Array(call.x, rows * width);
    if (scale.data() && !random.one_in(8)) dscale = Array(call.scale, width);
    if (bias.data() && !random.one_in(8)) dbias = Array(call.bias, width);
    check(rmsnorm::backward(call, Backward{
        .h = has_residual ? h.data() : x.data(), .h_step = has_residual ? width * size_of(call.x) : x_step,
        .scale = scale.data(), .inverse_rms = reinterpret_cast<double*>(inverse_rms.data()), .dy = dy.data(),
        .dh = dh.data(), .dx = dx.data(), .dscale = dscale.data(), .dbias = dbias.data(),
    }, pool));
    for (const Array* array : {&dx, &dscale, &dbias}) hash.add(*array);
}

}  // namespace

int main(int count, char**) {
    const Kernels* own = kernels();
    if (!own) {
        const char* wanted = std::getenv("RMSNORM_CPU_LEVEL");
        std::fprintf(stderr, "bits: this processor or build has no level %s\n", wanted ? wanted : "");
        return 2;
    }
    Hash all;
    for (int i = 0; i < calls; ++i) {
        Hash one;
        compute(i, count > 1 ? one : all);
        if (count > 1) std::printf("%d %016" PRIx64 "\n", i, one.value);
    }
    if (count > 1) return 0;
    std::printf("%s %016" PRIx64 "\n", own->level, all.value);
    if (all.value == expected) return 0;
    std::fprintf(stderr, "bits: the hash should be %016" PRIx64 "\n", expected);
    return 1;
}
