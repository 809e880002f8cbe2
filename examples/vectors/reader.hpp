// Reads a file VARIANT.DTYPE.txt of vectors/, in C++17 without a library. docs/checking.md describes it.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>

struct Array { int bits, size, block; std::vector<float> values, lo, hi; };  // lo and hi: of an output
struct Test { int id, rows, n, offset, norm; double eps; std::string flag; std::map<std::string, Array> arrays; };

inline std::vector<float> numbers(std::istream &file, int count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (std::uint32_t i = 0, bits = 0; i < values.size(); i++)
        file >> std::hex >> bits >> std::dec, std::memcpy(&values[i], &bits, sizeof bits);
    return values;
}

inline float hashed(std::uint32_t seed, std::uint32_t i, int bits, int exponent) {  // an element of a large input
    std::uint32_t z = seed + i * 0x9E3779B9u;
    z = (z ^ z >> 16) * 0x85EBCA6Bu, z = (z ^ z >> 13) * 0xC2B2AE35u, z = (z ^ z >> 16) >> (32 - bits);
    return static_cast<float>(std::ldexp(z, exponent - bits + 1) - std::ldexp(1, exponent));
}

inline bool next(std::istream &file, Test &t) {  // the next test of the file; false if there is none, or it is cut off
    std::string word, name;
    t = Test();
    if (!(file >> word >> t.id >> t.flag >> t.rows >> t.n >> t.eps >> t.offset >> t.norm)) return false;
    for (int first, second; file >> word && word != "end";) {
        file >> name;
        Array &a = t.arrays[name];
        file >> a.bits >> a.size >> first >> second;
        if (word == "hash") for (int i = 0; i < a.size; i++) a.values.push_back(hashed(first, i, a.bits, second));
        else if (word == "in") a.values = numbers(file, a.size);
        else a.block = first, a.lo = numbers(file, second), a.hi = numbers(file, second);
    }
    return word == "end";
}
