"""The 106-bit arithmetic of the golden against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from golden.oracle import BITS, FORMATS, array, nearest
from mpmath import mp, mpf

from rmsnorm.numpy_impl.double_double import DoubleDouble

N = 400


def _numbers(seed, count=N):
    """hi + lo with lo anywhere up to half an ulp of hi."""
    random = np.random.default_rng(seed)
    hi = np.ldexp(random.uniform(1.0, 2.0, count) * random.choice([-1.0, 1.0], count), random.integers(-60, 60, count))
    lo = random.uniform(-0.5, 0.5, count) * np.spacing(np.abs(hi)) * random.choice([0.0, 1e-9, 1.0], count)
    return DoubleDouble(hi, lo)


def _exact(value):
    hi, lo = np.broadcast_arrays(value.hi, value.lo)
    return [Fraction(float(a)) + Fraction(float(b)) for a, b in zip(hi.ravel(), lo.ravel(), strict=True)]


OPERATIONS = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_errs_by_less_than_2_to_the_minus_102(name):
    """The docstring says about 2^-104; of the sum of the magnitudes where terms cancel."""
    operation = OPERATIONS[name]
    a, b = _numbers(0), _numbers(1)
    result = operation(a, b)
    assert np.all(np.abs(result.lo) <= np.spacing(np.abs(result.hi)) / 2), "normalised"
    for x, y, got in zip(_exact(a), _exact(b), _exact(result), strict=True):
        want = operation(x, y)
        size = abs(x) + abs(y) if name in ("add", "subtract") else abs(want)
        assert abs(got - want) <= size * Fraction(2) ** -102


def test_a_root_errs_by_less_than_2_to_the_minus_102():
    square = _numbers(2) * _numbers(2)
    for x, got in zip(_exact(square), _exact(square.sqrt()), strict=True):
        assert abs(got * got - x) <= 2 * x * Fraction(2) ** -102


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_rounding_is_one_rounding(dtype):
    """Random numbers, and every kind of neighbour of a tie: on it, and next to it by a trace in hi or in lo."""
    precision, least, largest = FORMATS[dtype]
    random = np.random.default_rng(5)
    exponents = random.integers(max(least - precision - 3, -1000), min(math.frexp(largest)[1], 900), N)
    if dtype == "float64":
        tie = np.ldexp(1.0 + random.random(N), exponents)
        numbers = [DoubleDouble(tie, np.spacing(tie) / 2 * random.choice([-0.25, 0.25, 0.999, 0.0], N)), _numbers(4)]
    else:
        odd = 2 * random.integers(2 ** (precision - 1), 2**precision, N) + 1  # half way between two numbers
        tie = np.ldexp(odd.astype(np.float64), exponents - precision)
        trace = np.ldexp(tie, -60)
        numbers = [
            DoubleDouble(tie), DoubleDouble(tie, trace), DoubleDouble(tie, -trace), _numbers(4),
            DoubleDouble(np.nextafter(tie, np.inf)), DoubleDouble(np.nextafter(tie, 0.0)),
            DoubleDouble(np.ldexp(tie, least - precision - exponents + random.integers(-3, 2, N))),  # subnormal
            DoubleDouble(largest * np.array([1.0, 1 + 2.0 ** -(precision + 1), 1 + 2.0**-precision, 1.5])),
        ]  # fmt: skip
    for value in [*numbers, *(-value for value in numbers)]:
        with mp.workprec(BITS):
            want = [nearest(mpf(x.numerator) / x.denominator, dtype) for x in _exact(value)]
        with np.errstate(over="ignore"):
            got = value.round(dtype)
        assert got.dtype == (ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        assert np.array_equal(got, array(want, dtype))
    got = DoubleDouble([math.nan, math.inf, -math.inf, 0.0, -0.0]).round(dtype).astype(np.float64)
    assert np.array_equal(got, [math.nan, math.inf, -math.inf, 0.0, 0.0], equal_nan=True)
    assert np.signbit(got[3:]).tolist() == [False, True]
