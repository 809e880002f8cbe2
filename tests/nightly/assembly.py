"""The assembly of the Triton kernels beside the steps in plain Triton that stand for it in the interpreter, bit by bit.

In the interpreter a kernel takes the branch of a card here, and ptx.py executes its assembly. test_gpu.py starts it:

TRITON_INTERPRET=1 python -m pytest tests/nightly/assembly.py
"""

from __future__ import annotations

import itertools
from functools import cache

import ml_dtypes
import mpmath
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from ptx import execute
from triton.runtime import interpreter

from rmsnorm.gpu import triton_gradient, triton_pairs, triton_quotient
from rmsnorm.gpu.triton_gradient import _negative, _odd_single, anew, gradient_of
from rmsnorm.gpu.triton_pairs import inverse_rho, lowered, single, split_off
from rmsnorm.gpu.triton_quotient import by_cutting, by_cutting_wide, guarded

# NumPy warns of infinite numbers and NaN. All cases are fast.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
COUNT = 2048  # elements of a kernel here
ROOTS = 8192
executed = set()  # the texts of a test


class Assembly:
    """Results of inline assembly, of which a call has `pack` neighbours in each operand, in registers or in 32 bits."""

    def __init__(self, text, constraints, operands, types, pack, error):
        executed.add(text)
        shape = np.broadcast_shapes(*(operand.data.shape for operand in operands))
        types = [kind.scalar for kind in types]
        columns = [self.registers(np.broadcast_to(operand.data, shape), pack) for operand in operands]
        calls = zip(*(register.tolist() for column in columns for register in column), strict=True)
        rows = np.array([execute(text, constraints, *call, error=error) for call in calls], np.uint64)
        self.results, begin = [], 0
        for kind in types:
            width = kind.primitive_bitwidth // 8
            registers = max(1, pack * width // 4) if width < 4 else pack
            part = rows[:, begin : begin + registers].astype(WORDS[max(4, width)])
            bits = np.ascontiguousarray(part).view(WORDS[width]).reshape(len(rows), -1)[:, :pack]
            data = bits.reshape(shape).view(interpreter._get_np_dtype(kind))
            self.results.append(interpreter.TensorHandle(data, kind))
            begin += registers

    @staticmethod
    def registers(data, pack):
        """A register holds two neighbours of 16 bits, the first in its lower half, or one of more bits."""
        bits = np.ascontiguousarray(data).view(WORDS[data.itemsize]).reshape(-1)
        return bits.view(np.uint32).reshape(-1, pack * data.itemsize // 4).T if data.itemsize == 2 else (
            bits.reshape(-1, pack).T
        )  # fmt: skip

    def get_result(self, index):
        return self.results[index]


@pytest.fixture
def as_on_a_card(monkeypatch):
    """A function that lets kernels take the branches of a card in modules; its `error` is that of rsqrt.approx."""
    executed.clear()

    def begin(*modules, error=0):
        def create(self, text, constraints, operands, types, is_pure, pack):
            return Assembly(text, constraints, operands, types, pack, error)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", create)
        for module in modules:
            monkeypatch.setattr(module, "INTERPRETED", tl.constexpr(False))

    return begin


def tensor(array):
    array = np.ascontiguousarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def assert_same_bits(got, want, inputs):
    """NaN is NaN; a zero has its sign."""
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[want.element_size()]
    differ = ((got.view(word) != want.view(word)) & ~(got.isnan() & want.isnan())).nonzero()[:, 0].tolist()
    first = differ[:1]
    assert not differ, (len(differ), [*(a[first] for a in inputs)], got[first], want[first])


def numbers(random, dtype, most=np.inf):
    """Random bit patterns of a format: any, ordinary ones, short ones, tiny ones, and those at the ends of the range.

    Finite ones are below ``most``.
    """
    info, word = ml_dtypes.finfo(dtype), WORDS[np.dtype(dtype).itemsize]
    one = int(np.array(info.smallest_normal, dtype).view(word))  # the first bit of the exponent
    anything = random.integers(0, 1 << info.bits, COUNT, word).view(dtype)
    ordinary = random.normal(size=COUNT).astype(dtype)
    short = (random.integers(1, 8, COUNT) * 2.0 ** random.integers(-8, 8, COUNT)).astype(dtype)
    tiny = random.integers(0, 4 * one, COUNT).astype(word).view(dtype)
    infinity = int(np.array(np.inf, dtype).view(word))
    bits = [0, 0, 1, one - 1, one, one + 1, infinity - 1, infinity, infinity + 1]
    special = random.choice(np.array(bits, word), COUNT).view(dtype)
    kinds = random.choice(5, COUNT, p=[0.15, 0.4, 0.2, 0.1, 0.15])
    result = np.choose(kinds, [a.view(word) for a in (anything, ordinary, short, tiny, special)])
    result = (result ^ (random.integers(0, 2, COUNT).astype(word) << word(info.bits - 1))).view(dtype)
    too_large = np.isfinite(result.astype(float)) & (np.abs(result.astype(float)) >= most)
    return np.where(too_large, ordinary, result).astype(dtype)


def without_nan_of_float16(h):
    """Cards convert all NaN to one, whose bits ``lowered`` reads as those of a number: its row is computed again."""
    return np.where(np.isnan(h.astype(float)), np.inf, h).astype(h.dtype) if h.dtype == np.float16 else h


def odd(number):
    """A float64, or the one beside it, that has its last bit."""
    return (np.asarray(number, float).view(np.uint64) | np.uint64(1)).view(float)


def middles(random, dtype):
    """Numbers in the middle of two neighbours of a format."""
    word = WORDS[np.dtype(dtype).itemsize]
    low = (random.normal(size=COUNT) * 2.0 ** random.integers(-10, 10, COUNT)).astype(dtype)
    high = (low.view(word) + word(1)).view(dtype)
    return (low.astype(float) + high.astype(float)) / 2


def inverses(random, product, dtype):
    """Odd 1 / rho within 2^-20 to 2^20: any, beside short ones, 1 / 3, and with a result beside a middle."""
    anything = 2.0 ** random.uniform(-20, 20, COUNT)
    short = random.integers(1, 2**10, COUNT) * 2.0 ** random.integers(-10, 8, COUNT)
    beside = np.nextafter(short, random.choice([0, np.inf], COUNT))
    fixed = random.choice([1 / 3, 1 / 7, 1000 + 2.0**-43, 1000 - 2.0**-43, 2.0**20, 2.0**-20, 1 + 2.0**-23], COUNT)
    tie = np.abs(middles(random, dtype) / product)
    tie = np.where((tie > 2.0**-20) & (tie < 2.0**20), tie, anything)
    tie = np.nextafter(tie, random.choice([0, np.inf, 1], COUNT))
    result = np.choose(random.choice(5, COUNT, p=[0.2, 0.2, 0.1, 0.4, 0.1]), [anything, beside, fixed, tie, beside])
    return np.clip(odd(result), odd(2.0**-20), np.nextafter(2.0**20, 0))


@triton.jit
def cutting(h, gain, inverse, out, FORMAT: tl.constexpr, IS_NORMED: tl.constexpr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    result = by_cutting(tl.load(h + i), tl.load(gain + i), tl.load(inverse + i), FORMAT, IS_NORMED)
    tl.store(out + i, result)


@triton.jit
def cutting_wide(h, gain, inverse, out, OFFSET: tl.constexpr, FORMAT: tl.constexpr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    result = by_cutting_wide(tl.load(h + i), tl.load(gain + i), tl.load(inverse + i), OFFSET, FORMAT)
    tl.store(out + i, result)


@triton.jit
def guarded_squares(h, gain, out, FORMAT: tl.constexpr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    v = guarded(tl.load(h + i), tl.load(gain + i), FORMAT)
    tl.store(out + i, v * v)  # what a kernel needs of it: a zero may have the other sign


@triton.jit
def gradients(
    h, dy, gain, step, r, dh, sums, dx_out, sums_out, margin_out, HAS_SUM: tl.constexpr, OFFSET: tl.constexpr,
    FORMAT: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, COUNT)
    other = None
    if HAS_SUM:
        other = tl.load(dh + i)
    lifted = lowered(tl.load(gain + i)) + OFFSET * 2.0**-896
    dx, total, margin = gradient_of(
        tl.load(h + i), tl.load(dy + i), lifted, tl.load(step + i), tl.load(r + i), other, tl.load(sums + i),
        FORMAT, False,
    )  # fmt: skip
    tl.store(dx_out + i, dx)
    tl.store(sums_out + i, total)
    tl.store(margin_out + i, margin)


@triton.jit
def pairs(number, high_out, low_out, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    high, low = split_off(tl.load(number + i))
    tl.store(high_out + i, high)
    tl.store(low_out + i, low)


@triton.jit
def singles(number, narrow, odd_out, negative_out, again_out, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(odd_out + i, _odd_single(tl.load(number + i)))
    v = tl.load(narrow + i)
    tl.store(negative_out + i, _negative(single(v)))
    tl.store(again_out + i, anew(v))


@triton.jit
def roots(total, size, eps, inverse_out, short_out, POSITION: tl.constexpr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    n = tl.load(size + i)
    inverse, is_short = inverse_rho(tl.load(total + i), 1 / n, n, tl.load(eps + i), POSITION)
    tl.store(inverse_out + i, inverse)
    tl.store(short_out + i, is_short.to(tl.int8))


def quotients(random, dtype, is_normed):
    """h is below 2^40 if its row is not computed again."""
    kind = DTYPES[dtype]
    h, gain = numbers(random, kind, 2.0**40), numbers(random, kind, 2.0**40)
    gain = np.where(np.isfinite(gain.astype(float)), gain, 0).astype(kind)
    product = h.astype(float) * (1 if is_normed else gain.astype(float))
    return (h, gain, inverses(random, product, kind)), [dtype], {"FORMAT": dtype, "IS_NORMED": is_normed}


def wide_quotients(random, dtype, gain_dtype, offset):
    kind, gain_kind = DTYPES[dtype], DTYPES[gain_dtype]
    h, gain = without_nan_of_float16(numbers(random, kind, 2.0**40)), numbers(random, gain_kind, 2.0**40)
    gain = np.where(np.isfinite(gain.astype(float)), gain, -1).astype(gain_kind)
    inverse = inverses(random, h.astype(float) * (gain.astype(float) + offset), kind)
    return (h, gain, inverse), [dtype], {"FORMAT": dtype, "OFFSET": offset}


def large_gains(random, dtype):
    """A gain that is too large makes NaN of h."""
    gain = numbers(random, DTYPES[dtype])
    edge = np.array([2.0**40, 2.0**40 * (1 - 2.0**-8), -(2.0**40), 2.0**39]) if dtype == "bfloat16" else [65504.0]
    gain = np.where(random.random(COUNT) < 0.2, random.choice(edge, COUNT), gain).astype(DTYPES[dtype])
    return (numbers(random, DTYPES[dtype]), gain), ["float32"], {"FORMAT": dtype}


def steps_of_gradients(random, dtype, offset):
    """Also where the difference cancels, where it is beside the middle of two numbers, and where B is 0."""
    kind = DTYPES[dtype]
    h, dy, gain, dh = (numbers(random, kind) for _ in range(4))
    gain, h = np.where(np.isfinite(gain.astype(float)), gain, 1).astype(kind), without_nan_of_float16(h)
    r = inverses(random, np.ones(COUNT), kind)
    pulled = dy.astype(float) * r * (gain.astype(float) + offset)
    aim = np.where(random.random(COUNT) < 0.5, middles(random, kind), pulled * 2.0 ** -random.integers(8, 50, COUNT))
    step = (pulled - aim) / h.astype(float)
    signs = random.choice([-1, 1], COUNT)
    in_range = (np.abs(step) >= 2.0**-60) & (np.abs(step) <= 2.0**90) & (random.random(COUNT) < 0.7)
    step = np.where(in_range, step, signs * 2.0 ** random.uniform(-60, 90 if dtype == "float32" else 20, COUNT))
    step = np.where(random.random(COUNT) < 0.05, 0.0 * signs, step)
    sums = np.where(random.random(COUNT) < 0.3, -h.astype(float) * dy.astype(float) * r, random.normal(size=COUNT))
    sums = np.where(random.random(COUNT) < 0.05, random.choice([0.0, -0.0, np.inf, np.nan], COUNT), sums)
    options = {"HAS_SUM": bool(offset), "OFFSET": offset, "FORMAT": dtype}
    return (h, dy, gain, step, r, dh, sums), [dtype, "float64", "float32"], options


def wide_numbers(random):
    """Of float64: any bit pattern, numbers that float32 has, their middles, what is beside those, and special ones."""
    anything = random.integers(0, 1 << 64, COUNT, np.uint64).view(float)
    narrow = numbers(random, np.float32).astype(float)
    middle = middles(random, np.float32) * 2.0 ** random.integers(-120, 100, COUNT)
    beside = np.nextafter(random.choice([narrow, middle]), random.choice([0, np.inf, -np.inf], COUNT))
    tiny = random.normal(size=COUNT) * 2.0 ** random.integers(-155, -120, COUNT)
    large = 2.0**128 * (1 - 2.0 ** -random.integers(20, 54, COUNT)) * random.choice([-1, 1], COUNT)
    special = random.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324, 1.7e308, 2.0**128, 2.0**-149], COUNT)
    return np.choose(random.integers(7, size=COUNT), [anything, narrow, middle, beside, tiny, large, special])


def halves(random):
    return [wide_numbers(random)], ["float32"] * 2, {}


def conversions(random, dtype):
    return [wide_numbers(random), numbers(random, DTYPES[dtype])], ["float32", "float64", dtype], {}


BOTH = ("bfloat16", "float16")
STEPS = [  # each kernel, its module, how many texts of assembly it has, and what it is asked
    *((cutting, triton_quotient, 1, quotients, each) for each in itertools.product(BOTH, (False, True))),
    *((cutting_wide, triton_quotient, 1, wide_quotients, (dtype, gain, offset))
      for dtype in BOTH for gain in (dtype, "float32") for offset in (0.0, 1.0)),
    *((guarded_squares, triton_quotient, 1, large_gains, (dtype,)) for dtype in BOTH),
    *((gradients, triton_gradient, 1, steps_of_gradients, each) for each in itertools.product(DTYPES, (0.0, 1.0))),
    *((singles, triton_gradient, 3, conversions, (dtype,)) for dtype in DTYPES),
    (pairs, triton_pairs, 1, halves, ()),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "module", "texts", "draw", "arguments"), STEPS,
                         ids=["-".join(map(str, (draw.__name__, *each))) for *_, draw, each in STEPS])  # fmt: skip
def test_assembly_has_the_bits_of_plain_triton(kernel, module, texts, draw, arguments, as_on_a_card):
    drawn, dtypes, options = draw(np.random.default_rng(1), *arguments)
    inputs = [tensor(a) for a in drawn]
    want, got = ([torch.empty(COUNT, dtype=getattr(torch, dtype)) for dtype in dtypes] for _ in range(2))
    kernel[(1,)](*inputs, *want, COUNT=COUNT, **options)
    assert not executed
    as_on_a_card(module)
    kernel[(1,)](*inputs, *got, COUNT=COUNT, **options)
    assert len(executed) == texts
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other, inputs)


def rows(random):
    """The sums of squares, sizes and eps of rows of all kinds, with rho within 2^-500 to 2^500."""
    size = random.choice([1, 3, 7, 80, 128, 1000, 4096, 16383], ROOTS).astype(float)
    eps = random.choice([0.0, 1e-6, 1e-5, 2.0**-20, 1.0], ROOTS)
    near_one = (1 + random.integers(-40, 41, ROOTS) * 2.0**-52) * 4.0 ** random.integers(-20, 20, ROOTS)
    short = (random.integers(1, 2**12, ROOTS) * 2.0 ** random.integers(-12, 12, ROOTS)) ** 2  # the square
    beside = np.nextafter(short, random.choice([0, np.inf], ROOTS))
    inverse = 1 / (random.integers(1, 2**12, ROOTS) * 2.0 ** random.integers(-12, 12, ROOTS)) ** 2
    kinds = [
        random.chisquare(80, ROOTS) / 80, 2.0 ** random.uniform(-990, 990, ROOTS), short, beside, inverse, near_one,
        np.abs(inverse - eps), 2.0 ** random.uniform(-60, 10, ROOTS), random.choice([0.0, 1e-300], ROOTS),
        2.0 ** random.integers(-300, 20, ROOTS),
    ]  # fmt: skip
    square = np.choose(random.integers(len(kinds), size=ROOTS), kinds)
    eps = np.where((square < 2.0**-990) & (eps == 0), 1e-6, eps)
    less = random.random(ROOTS) < 0.2  # the sum with eps is the square of a short number, or almost
    square = np.where(less & (short > eps), short - eps, square)
    return square * size, size, eps


def launch(inputs):
    results = torch.empty(ROOTS, dtype=torch.float64), torch.empty(ROOTS, dtype=torch.int8)
    roots[(1,)](*map(tensor, inputs), *results, POSITION="inside", COUNT=ROOTS)
    return [result.numpy() for result in results]


def rounded_to_odd(number):
    """A positive number of mpmath's as a float64."""
    fraction, exponent = mpmath.frexp(number)
    whole = mpmath.floor(fraction * 2**53)
    return float(mpmath.ldexp(int(whole) | (whole != fraction * 2**53), int(exponent) - 53))


@cache
def roots_by_mpmath():
    """Rows, and for each 1 / rho rounded to odd, and whether it or rho is a float32."""
    total, size, eps = inputs = rows(np.random.default_rng(8))
    with mpmath.workprec(1300):  # which have the sum of eps and the least square
        rhos = [mpmath.sqrt(mpmath.mpf(q) + mpmath.mpf(e)) for q, e in zip(total / size, eps, strict=True)]
        odd_ones = [rounded_to_odd(1 / rho) for rho in rhos]
        short = [any(mpmath.mpf(float(np.float32(float(number)))) == number for number in pair)
                 for pair in zip(rhos, odd_ones, strict=True)]  # fmt: skip
    return inputs, (np.array(odd_ones), np.array(short, np.int8))


def assert_equal_roots(got, want, inputs, where=True, exact=True):
    """Unless exact, an inverse may be 1.5 units beside 1 / rho, but not beyond a number of 24 bits."""
    inverse, short = (a != b for a, b in zip(got, want, strict=True))
    if not exact:
        words = [a[0].view(np.int64) for a in (got, want)]
        high, low = words[0] >> 29 != words[1] >> 29, (words[0] % 2**29 == 0) != (words[1] % 2**29 == 0)
        inverse = (np.abs(words[0] - words[1]) > 2) | high | low
    differ = np.argwhere((inverse | short) & where)[:, 0]
    assert not len(differ), (len(differ), [c[differ[:3]].tolist() for c in (*inputs, *got, *want)])


@pytest.mark.parametrize("error", [None, -1, 0, 1])
def test_an_inverse_root_is_on_the_right_side_of_short_numbers(error, as_on_a_card):
    """Rounded to odd in the interpreter where float32 has the root with which it begins, and on a card without eps.

    A card's rough root is up to one unit of its last place, 2^-20, beside the nearest.
    """
    inputs, want = roots_by_mpmath()
    if error is None:
        where = (want[0] > 2.0**-120) & (want[0] < 2.0**120)
        assert where.mean() > 0.8
        assert_equal_roots(launch(inputs), want, inputs, where)
        return
    as_on_a_card(triton_pairs, error=error)
    got = launch(inputs)
    assert_equal_roots(got, want, inputs, inputs[2] == 0)
    assert_equal_roots(got, want, inputs, exact=False)
    assert len(executed) == 1
