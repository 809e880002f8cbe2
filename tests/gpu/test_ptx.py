"""The executor of inline assembly against NumPy, ml_dtypes and numbers computed by hand."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from ptx import FORMATS, INSTRUCTIONS, execute, rounded

# NumPy warns of infinite numbers and NaN. All cases are fast.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.sample(1000)]

F32, F64, BF16, F16 = np.float32, np.float64, ml_dtypes.bfloat16, np.float16
NAN = {F32: 0x7FFFFFFF, F64: 0x7FFFFFFFFFFFFFFF, BF16: 0x7FFF, F16: 0x7FFF}
NAMES = {F32: "f32", F64: "f64", BF16: "bf16", F16: "f16"}
LETTERS = {"f32": "f", "f64": "d", "bf16": "h", "f16": "h"}
WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits_of(array, dtype):
    """Bit patterns of numbers, with NaN as the cards give it."""
    array = np.asarray(array, dtype)
    bits = array.view(WORDS[array.itemsize]).astype(object)
    return np.where(np.isnan(array.astype(F64)), NAN[dtype], bits).tolist()


def patterns(dtype, count, seed):
    """Random bit patterns: any, of exponents that are close together, subnormal ones, and the special ones."""
    random = np.random.default_rng(seed)
    shape = FORMATS[NAMES[dtype]]
    word, one = WORDS[shape.bits // 8], 1 << shape.precision - 1
    anything = random.integers(0, 1 << shape.bits, count, word)
    close = random.integers(shape.infinity // 2 // one * one, (shape.infinity // 2 // one + 4) * one, count, word)
    tiny = random.integers(0, 4 * one, count, word)
    special = [0, 1, one - 1, one, one + 1, shape.infinity - 1, shape.infinity, shape.infinity + 1, 2 * one - 1]
    special = random.choice(np.array(special, word), count)
    sign = random.integers(0, 2, 4 * count, word) << word(shape.bits - 1)
    return random.permutation(np.concatenate([anything, close, tiny, special]) ^ sign).view(dtype)


def one_result(name, *operands):
    """What one instruction makes of bit patterns, in registers of the type that it ends with, after its result's."""
    result, *kinds = INSTRUCTIONS[name][0]
    letters = {"f32": "f", "f64": "d", "b64": "l", "s64": "l", "x16": "h", "b16": "h"}
    constraints = ",".join([f"={letters.get(result, 'r')}", *(letters.get(kind, "r") for kind in kinds)])
    registers = ", ".join(f"${i}" for i in range(len(kinds) + 1))
    return execute(f"{name} {registers};", constraints, *operands)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(("name", "ufunc"), [("add", np.add), ("sub", np.subtract), ("mul", np.multiply)])
def test_rounding_to_nearest_is_numpys(dtype, name, ufunc):
    a, b = patterns(dtype, 80, 1), patterns(dtype, 80, 2)
    expected = bits_of(ufunc(a, b), dtype)
    pairs = zip(a.view(WORDS[a.itemsize]).tolist(), b.view(WORDS[a.itemsize]).tolist(), strict=True)
    assert [one_result(f"{name}.rn.{NAMES[dtype]}", *pair) for pair in pairs] == expected


def fused(a, b, c):
    """a * b + c, rounded once, by Python: its division of integers is."""
    if hasattr(math, "fma"):
        try:
            return math.fma(a, b, c)
        except ValueError:  # an infinite number times 0, and the like
            return math.nan
        except OverflowError:
            pass
    if not all(map(math.isfinite, (a, b, c))):
        return c if math.isfinite(a) and math.isfinite(b) else a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        sign = math.copysign(1, a) * math.copysign(1, b)
        return math.copysign(0.0, sign) if sign == math.copysign(1, c) else 0.0
    try:
        return exact.numerator / exact.denominator or math.copysign(0.0, exact.numerator)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


@pytest.mark.parametrize("seed", [0, 1])
def test_a_fused_operation_of_float64_is_pythons(seed):
    a, b, c = (patterns(F64, 120, 10 * seed + i) for i in range(3))
    if seed:  # sums that nearly cancel
        c = np.where(np.arange(c.size) % 2, -(a * b), c)
    expected = bits_of([fused(*row) for row in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)], F64)
    rows = zip(*(array.view(np.uint64).tolist() for array in (a, b, c)), strict=True)
    assert [one_result("fma.rn.f64", *row) for row in rows] == expected


def neighbours(exact, dtype):
    """The largest number of a format up to a Fraction, and the smallest from it on; not for those out of range."""
    near = dtype(float(exact))
    below, above = (near, near)
    while Fraction(float(below)) > exact:
        below = np.nextafter(below, dtype(-np.inf))
    while Fraction(float(above)) < exact:
        above = np.nextafter(above, dtype(np.inf))
    if Fraction(float(below)) < exact:
        above = np.nextafter(below, dtype(np.inf))
    return below, above


def nearest(exact, below, above):
    to_below, to_above = exact - Fraction(float(below)), Fraction(float(above)) - exact
    is_even = int(below.view(WORDS[below.itemsize])) % 2 == 0
    return below if to_below < to_above or (to_below == to_above and is_even) else above


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_each_mode_chooses_its_neighbour(dtype):
    """Numbers, middles of two neighbours, and what is a little beside them, subnormal ones included."""
    random = np.random.default_rng(5)
    bits = patterns(dtype, 60, 3)
    for number in bits[np.isfinite(bits.astype(F64))]:
        after = np.nextafter(number, dtype(np.inf))
        if not np.isfinite(after) or float(number) == 0 or float(after) == 0:
            continue
        step = Fraction(float(after)) - Fraction(float(number))
        for part in (Fraction(0), Fraction(1, 2), Fraction(1, 2) + Fraction(1, 2**90), Fraction(random.random())):
            exact = Fraction(float(number)) + part * step
            below, above = (number, after) if part else (number, number)
            assert neighbours(exact, dtype) == (below, above)
            towards_zero = below if exact > 0 else above
            expected = {"rn": nearest(exact, below, above), "rz": towards_zero, "rm": below, "rp": above}
            for mode, chosen in expected.items():
                assert rounded(exact, FORMATS[NAMES[dtype]], mode) == int(chosen.view(WORDS[chosen.itemsize])), mode


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_casts_are_those_of_ml_dtypes(dtype):
    """The first operand is the upper half."""
    name, numbers = NAMES[dtype], patterns(F32, 120, 7)
    middles = (patterns(BF16, 100, 8).view(np.uint16).astype(np.uint32) << 16 | 0x8000).view(F32)
    numbers = np.concatenate([numbers, middles])
    expected = bits_of(numbers.astype(dtype), dtype)
    words = numbers.view(np.uint32).tolist()
    assert [one_result(f"cvt.rn.{name}.f32", word) for word in words] == expected
    pairs = [one_result(f"cvt.rn.{name}x2.f32", a, b) for a, b in pairwise(words)]
    assert pairs == [a << 16 | b for a, b in pairwise(expected)]


@pytest.mark.parametrize(("name", "source", "target"), [
    ("cvt.rn.f32.f64", F64, F32), ("cvt.f64.f32", F32, F64), ("cvt.f32.f16", F16, F32), ("cvt.f32.bf16", BF16, F32),
    ("cvt.rn.f64.s32", np.int32, F64), ("cvt.rn.f32.s32", np.int32, F32), ("cvt.rn.f32.u32", np.uint32, F32),
])  # fmt: skip
def test_conversions_are_numpys(name, source, target):
    if np.issubdtype(source, np.integer):
        numbers = np.random.default_rng(9).integers(0, 2**32, 500, np.uint32).view(source)
    else:
        numbers = patterns(source, 120, 9)
        numbers = numbers[~np.isnan(numbers.astype(F64))]
    expected = bits_of(numbers.astype(target), target)
    assert [one_result(name, word) for word in numbers.view(WORDS[numbers.itemsize]).tolist()] == expected


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("name", ["fma", "mul", "add", "sub"])
def test_a_lane_is_rounded_once(dtype, name):
    """The exact result of two or three numbers, from Python's integers, and both lanes in their order."""
    count = 3 if name == "fma" else 2
    rows = [patterns(dtype, 60, seed) for seed in range(20, 20 + count)]
    kept = np.all([np.isfinite(row.astype(F64)) for row in rows], axis=0)
    rows = [row[kept] for row in rows]
    words = list(zip(*(row.view(np.uint16).tolist() for row in rows), strict=True))
    expected = []  # or None where the result is 0 or infinite, which other tests have
    limit = Fraction(float(ml_dtypes.finfo(dtype).max))
    for numbers in zip(*(row.astype(F64).tolist() for row in rows), strict=True):
        a, b, *rest = map(Fraction, numbers)
        exact = {"fma": lambda a, b, c=0: a * b + c, "mul": lambda a, b: a * b, "add": lambda a, b: a + b,
                 "sub": lambda a, b: a - b}[name](a, b, *rest)  # fmt: skip
        inside = 0 < abs(exact) <= limit
        expected.append(int(nearest(exact, *neighbours(exact, dtype)).view(np.uint16)) if inside else None)
    results = [one_result(f"{name}.rn.{NAMES[dtype]}", *row) for row in words]
    compared = [(result, wanted) for result, wanted in zip(results, expected, strict=True) if wanted is not None]
    assert len(compared) > 60
    assert all(result == wanted for result, wanted in compared)
    for (lower, upper), rows in zip(pairwise(results), pairwise(words), strict=True):
        packed = [a | b << 16 for a, b in zip(*rows, strict=True)]
        assert one_result(f"{name}.rn.{NAMES[dtype]}x2", *packed) == lower | upper << 16


def bits(number, dtype=F32):
    return bits_of(number, dtype)


ULP = 2.0**-23
BY_HAND = [  # instruction, operands, result
    # 1 - 2^-60 and 1 + 2^-60 have more than 24 bits
    ("fma.rz.f32", [bits(1), bits(1), bits(-(2.0**-60))], bits(1 - 2.0**-24)),
    ("fma.rz.f32", [bits(1), bits(1), bits(2.0**-60)], bits(1)),
    ("fma.rn.f32", [bits(1), bits(1), bits(-(2.0**-60))], bits(1)),
    ("fma.rp.f32", [bits(1), bits(1), bits(2.0**-60)], bits(1 + ULP)),
    ("fma.rm.f32", [bits(-1), bits(1), bits(-(2.0**-60))], bits(-1 - ULP)),
    # (2^12 + 1)^2 = 2^24 + 2^13 + 1
    ("fma.rz.f32", [bits(4097), bits(4097), bits(0)], bits(2**24 + 2**13)),
    ("fma.rp.f32", [bits(4097), bits(4097), bits(0)], bits(2**24 + 2**13 + 2)),
    ("fma.rn.f32", [bits(4097), bits(4097), bits(-(2**24) - 2**13)], bits(1)),
    ("fma.rn.f32", [bits(4097), bits(4097), bits(2)], bits(2**24 + 2**13 + 4)),  # a middle: to even
    # beyond the largest number
    ("mul.rz.f32", [0x7F7FFFFF, bits(2)], 0x7F7FFFFF),
    ("mul.rz.f32", [0xFF7FFFFF, bits(2)], 0xFF7FFFFF),
    ("mul.rm.f32", [0x7F7FFFFF, bits(2)], 0x7F7FFFFF),
    ("mul.rm.f32", [0xFF7FFFFF, bits(2)], 0xFF800000),
    ("mul.rp.f32", [0x7F7FFFFF, bits(2)], 0x7F800000),
    ("mul.rp.f32", [0xFF7FFFFF, bits(2)], 0xFF7FFFFF),
    ("mul.rn.f32", [0xFF7FFFFF, bits(2)], 0xFF800000),
    ("add.rn.f32", [0x7F7FFFFF, bits(2.0**102)], 0x7F7FFFFF),  # less than half of the last place
    ("add.rn.f32", [0x7F7FFFFF, bits(2.0**103)], 0x7F800000),  # half of it
    ("mul.rz.f64", [0x7FEFFFFFFFFFFFFF, bits(2, F64)], 0x7FEFFFFFFFFFFFFF),
    ("cvt.rz.f32.f64", [bits(1e300, F64)], 0x7F7FFFFF),
    ("cvt.rz.bf16.f32", [0x7F7FFFFF], 0x7F7F),
    ("cvt.rn.bf16.f32", [0x7F7FFFFF], 0x7F80),
    ("cvt.rz.bf16x2.f32", [0x3F80FFFF, 0xBF81FFFF], 0x3F80BF81),
    # zeros
    ("add.rn.f32", [bits(1), bits(-1)], bits(0)),
    ("add.rm.f32", [bits(1), bits(-1)], bits(-0.0)),
    ("add.rz.f32", [bits(-0.0), bits(-0.0)], bits(-0.0)),
    ("add.rp.f32", [bits(-0.0), bits(0)], bits(0)),
    ("add.rm.f32", [bits(0), bits(0)], bits(0)),
    ("sub.rm.f64", [bits(3, F64), bits(3, F64)], bits(-0.0, F64)),
    ("fma.rn.f32", [bits(-0.0), bits(5), bits(-0.0)], bits(-0.0)),
    ("fma.rn.f32", [bits(-0.0), bits(5), bits(0)], bits(0)),
    ("fma.rm.f32", [bits(2), bits(3), bits(-6)], bits(-0.0)),
    ("mul.rn.f32", [0x80000001, 0x00000001], bits(-0.0)),
    ("mul.rm.f32", [0x80000001, 0x00000001], 0x80000001),
    ("mul.rp.f32", [0x00000001, 0x00000001], 0x00000001),
    ("cvt.rn.f32.f64", [bits(-1e-300, F64)], bits(-0.0)),
    ("cvt.rp.f32.f64", [bits(-1e-300, F64)], bits(-0.0)),
    ("cvt.rn.f64.s32", [0], 0),
    # NaN
    ("add.rn.f32", [0xFFC12345, bits(1)], 0x7FFFFFFF),
    ("mul.rn.f32", [0x7F800000, bits(-0.0)], 0x7FFFFFFF),
    ("add.rn.f32", [0x7F800000, 0xFF800000], 0x7FFFFFFF),
    ("fma.rn.f64", [0x7FF0000000000000, 0, 0], 0x7FFFFFFFFFFFFFFF),
    ("fma.rn.f32", [bits(2), 0x7F800000, 0xFF800000], 0x7FFFFFFF),
    ("fma.rn.bf16x2", [0x3F807FC1, 0x40003F80, 0x00003F80], 0x40007FFF),
    ("cvt.rn.bf16x2.f32", [0xFFC00001, bits(1)], 0x7FFF3F80),
    ("cvt.f64.f32", [0xFFC00001], 0x7FFFFFFFFFFFFFFF),
    ("cvt.f32.bf16", [0xFFC1], 0xFFC10000),
    ("mov.f32", [0x7F812345], 0x7F812345),
    # without .ftz subnormal numbers stay
    ("mul.rn.f32", [0x00000003, bits(1)], 0x00000003),
    ("mul.rn.ftz.f32", [0x80000003, bits(1e30)], bits(-0.0)),
    ("mul.rn.ftz.f32", [0x80800000, bits(0.5)], bits(-0.0)),
    ("mul.rn.ftz.f32", [0x80800000, bits(1)], 0x80800000),
    ("cvt.ftz.f64.f32", [0x80000003], bits(-0.0, F64)),
    ("cvt.rn.ftz.f32.f64", [bits(1e-40, F64)], 0),
    ("cvt.rn.ftz.f32.f64", [bits(-0.0, F64)], bits(-0.0)),
    ("add.rn.f16", [0x0001, 0x0001], 0x0002),
    ("add.rn.ftz.f16", [0x0001, 0x8400], 0x8400),
    # the larger and the smaller
    ("max.f32", [bits(-0.0), bits(0)], bits(0)),
    ("min.f32", [bits(0), bits(-0.0)], bits(-0.0)),
    ("max.f32", [0x7FC00000, bits(-3)], bits(-3)),
    ("max.NaN.f32", [0x7FC00000, bits(-3)], 0x7FFFFFFF),
    ("min.f32", [0x7FC00000, 0x7FC00000], 0x7FFFFFFF),
    ("max.bf16x2", [0x3F80_7FC0, 0x4000_C000], 0x4000_C000),
    ("max.NaN.bf16x2", [0x3F80_7FC0, 0x4000_C000], 0x4000_7FFF),
    ("min.bf16x2", [0xFF80_0000, 0x4000_8000], 0xFF80_8000),
    ("min.s32", [0xFFFFFFFF, 1], 0xFFFFFFFF),
    ("min.u32", [0xFFFFFFFF, 1], 1),
    ("abs.bf16x2", [0xBF80_8000], 0x3F80_0000),
    ("neg.bf16x2", [0xBF80_0000], 0x3F80_8000),
    ("neg.f16x2", [0x0001_FC00], 0x8001_7C00),
    ("abs.f32", [0x80000001], 1),
    ("neg.f64", [0], 1 << 63),
    ("abs.s32", [0xFFFFFFFE], 2),
    ("abs.s32", [0x80000000], 0x80000000),
    ("neg.s32", [1], 0xFFFFFFFF),
    # integers and bits
    ("add.s32", [0xFFFFFFFF, 2], 1),
    ("sub.u32", [0, 1], 0xFFFFFFFF),
    ("mad.lo.s32", [0xFFFFFFFF, 5, 7], 2),
    ("not.b32", [0xF0F0F0F0], 0x0F0F0F0F),
    ("xor.b64", [1 << 63 | 5, 3], 1 << 63 | 6),
    ("shl.b32", [1, 31], 1 << 31),
    ("shl.b32", [1, 32], 0),
    ("shl.b64", [3, 63], 1 << 63),
    ("shr.u32", [1 << 31, 200], 0),
    ("shr.s32", [1 << 31, 200], 0xFFFFFFFF),
    ("shr.s32", [1 << 31, 1], 3 << 30),
    ("shr.b32", [1 << 31, 1], 1 << 30),
    ("shf.l.wrap.b32", [0x89ABCDEF, 0x01234567, 8], 0x23456789),
    ("shf.r.wrap.b32", [0x89ABCDEF, 0x01234567, 8], 0x6789ABCD),
    ("shf.l.wrap.b32", [0x89ABCDEF, 0x01234567, 32], 0x01234567),
    ("shf.l.clamp.b32", [0x89ABCDEF, 0x01234567, 33], 0x89ABCDEF),
    ("shf.r.clamp.b32", [0x89ABCDEF, 0x01234567, 33], 0x01234567),
    ("lop3.b32", [0xFF00FF00, 0xF0F0F0F0, 0xCCCCCCCC, 0x80], 0xFF00FF00 & 0xF0F0F0F0 & 0xCCCCCCCC),
    ("lop3.b32", [0xFF00FF00, 0xF0F0F0F0, 0xCCCCCCCC, 0xEA], (0xFF00FF00 & 0xF0F0F0F0) | 0xCCCCCCCC),
    ("lop3.b32", [0xFF00FF00, 0xF0F0F0F0, 0xCCCCCCCC, 0xF0 & ~0xAA], 0xFF00FF00 & ~0xCCCCCCCC),
    ("prmt.b32", [0x33221100, 0x77665544, 0x7632], 0x77663322),
    ("prmt.b32", [0x33221100, 0x77665544, 0x5410], 0x55441100),
    ("prmt.b32", [0x33228100, 0x77665544, 0x9810], 0xFF008100),
    ("prmt.b32", [0x33228180, 0x77665544, 0xF808], 0x00FF80FF),
]  # fmt: skip


@pytest.mark.parametrize(("name", "operands", "result"), BY_HAND)
def test_results_known_by_hand(name, operands, result):
    assert hex(one_result(name, *operands)) == hex(result)


LESS, MORE, ZERO, NEGATIVE_ZERO, NO_NUMBER = bits(1), bits(2), bits(0), bits(-0.0), 0x7FC00000


@pytest.mark.parametrize(("name", "truths"), [
    # of 1 and 2, 2 and 1, 2 and 2, 0 and -0, 1 and NaN, NaN and NaN
    ("eq.f32", "001100"), ("ne.f32", "110000"), ("lt.f32", "100000"), ("le.f32", "101100"), ("gt.f32", "010000"),
    ("ge.f32", "011100"), ("equ.f32", "001111"), ("neu.f32", "110011"), ("ltu.f32", "100011"), ("leu.f32", "101111"),
    ("gtu.f32", "010011"), ("geu.f32", "011111"), ("num.f32", "111100"), ("nan.f32", "000011"),
    ("eq.b32", "001001"), ("lt.s32", "100010"), ("lt.u32", "100110"), ("ge.s32", "011101"), ("ne.u32", "110110"),
])  # fmt: skip
def test_comparisons(name, truths):
    pairs = [(LESS, MORE), (MORE, LESS), (MORE, MORE), (ZERO, NEGATIVE_ZERO), (LESS, NO_NUMBER), (NO_NUMBER, NO_NUMBER)]
    kind = "f" if name.endswith("f32") else "r"
    asm = f"{{ .reg .pred p; setp.{name} p, $1, $2; selp.b32 $0, 1, 0, p; }}"
    assert "".join(str(execute(asm, f"=r,{kind},{kind}", *pair)) for pair in pairs) == truths


@pytest.mark.parametrize(("operand", "result"), [(4, 14), (5, 105)])
def test_a_statement_with_a_predicate(operand, result):
    asm = "{.reg .pred p;\n.reg .b32 t0, t1;\nsetp.ge.s32 p, $1, 5;\n@p add.s32 $0, $1, 100;\n@!p add.s32 $0, $1, 0xa;}"
    assert execute(asm, "=r,r", operand) == result


def test_registers_are_taken_apart_and_put_together():
    asm = """{ .reg .b32 lo, hi; .reg .b16 h0, h1; .reg .b64 $$d; mov.b64 {lo, hi}, $2; mov.b64 $$d, {hi, lo};
    mov.b64 $1, $$d; mov.b32 {h0, h1}, lo; mov.b32 $0, {h1, h0}; }"""
    assert execute(asm, "=r,=l,l", 0x0123456789ABCDEF) == (0xCDEF89AB, 0x89ABCDEF01234567)


@pytest.mark.parametrize(("asm", "constraints", "result"), [
    ("mov.b32 $0, 12;", "=r", 12), ("mov.b32 $0, -1;", "=r", 0xFFFFFFFF), ("mov.b32 $0, -0x10;", "=r", 0xFFFFFFF0),
    ("mov.b32 $0, 0xFF000000;", "=r", 0xFF000000), ("mov.f32 $0, 0f3F800000;", "=f", 0x3F800000),
    ("mov.f64 $0, 0d3FF0000000000000;", "=d", 0x3FF0000000000000), ("mov.b64 $0, -2;", "=l", 2**64 - 2),
    ("{ .reg .f32 a; mov.f32 a, 0fBF800000; fma.rn.f32 $0, a, a, 0f80000000; }", "=f", 0x3F800000),
])  # fmt: skip
def test_immediate_numbers(asm, constraints, result):
    assert execute(asm, constraints) == result


@pytest.mark.parametrize("error", [-1, 0, 1])
def test_the_approximate_root_of_float64(error):
    """To 21 bits, of the upper word, within 2^-20 also where `error` moves it."""
    numbers = np.abs(patterns(F64, 60, 11))
    numbers = numbers[np.isfinite(numbers) & (numbers >= 2.0**-1022)]
    asm = "rsqrt.approx.ftz.f64 $0, $1;"
    for word in numbers.view(np.uint64).tolist():
        result = execute(asm, "=d,d", word, error=error)
        nearest_one = execute(asm, "=d,d", word)
        number = Fraction(float(np.uint64(word >> 32 << 32).view(F64)))
        assert result % 2**32 == 0
        assert (result >> 32) - (nearest_one >> 32) == error
        ratio = number * Fraction(float(np.uint64(nearest_one).view(F64))) ** 2  # 1 if it were exact
        assert (1 - Fraction(1, 2**21)) ** 2 <= ratio <= (1 + Fraction(1, 2**21)) ** 2


@pytest.mark.parametrize(("name", "operand", "result"), [
    ("f64", 0x4010000012345678, 0x3FE0000000000000), ("f64", 0, 0x7FF0000000000000),
    ("f64", 1 << 63, 0xFFF0000000000000), ("f64", 0x8000000100000000, 0xFFF0000000000000),
    ("f64", 0x7FF0000000000000, 0), ("f64", 0xBFF0000000000000, 0x7FFFFFFF00000000),
    ("f32", 0x40800000, 0x3F000000), ("f32", 0x00000001, 0x7F800000), ("f32", 0xBF800000, 0x7FFFFFFF),
    ("f32", 0x40000000, 0x3F3504F3),
])  # fmt: skip
def test_special_operands_of_an_approximate_root(name, operand, result):
    assert hex(one_result(f"rsqrt.approx.ftz.{name}", operand)) == hex(result)


@pytest.mark.parametrize(("asm", "constraints", "inputs", "error", "message"), [
    ("popc.b32 $0, $1;", "=r,r", [1], NotImplementedError, "popc.b32"),
    ("fma.f32 $0, $1, $1, $1;", "=f,f", [1], NotImplementedError, "fma.f32"),
    ("add.s32 $0, t0, $1;", "=r,r", [1], ValueError, "t0 is not declared"),
    ("{ .reg .b32 t0; add.s32 $0, t0, $1; }", "=r,r", [1], ValueError, "t0 is read before it is written"),
    ("mov.b64 {$0, $1}, $2;", "=r,=h,l", [1], ValueError, "%1 is b16, but must have 32 bits"),
    ("mov.b64 $0, $1;", "=l,r", [1], ValueError, "%1 is b32, but must have 64 bits"),
    ("add.s32 $0, $1;", "=r,r", [1], ValueError, "2 operands, but must have 3"),
    ("add.s32 $0, $1, 1", "=r,r", [1], ValueError, "semicolon"),
    ("add.s32 $0, $1, 0x100000000;", "=r,r", [1], ValueError, "no immediate number of type s32"),
    ("add.rn.f32 $0, $1, 1;", "=f,f", [1], ValueError, "no immediate number of type f32"),
    ("add.rn.bf16x2 $0, $1, 1;", "=r,r", [1], ValueError, "1 is not declared"),
    ("mov.b32 $0, $1;", "=r,r", [], ValueError, "1 inputs, but 0 came"),
    ("mov.b32 $0, $1;", "=r,r", [-1], ValueError, "no bit pattern of 32 bits"),
    ("mov.b32 $1, $1;", "=r,r", [1], ValueError, "%0 is read before it is written"),
])  # fmt: skip
def test_what_is_refused(asm, constraints, inputs, error, message):
    with pytest.raises(error, match=message):
        execute(asm, constraints, *inputs)
