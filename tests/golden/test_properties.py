"""The golden in numbers of very different sizes; in every framework: ends of the range, and subnormal numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden.cases import drawn
from golden.oracle import FORMATS, check
from mpmath import mp

from rmsnorm import cpu
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.numpy_impl import rms_norm
from rmsnorm.parity.cases import make
from rmsnorm.specification import dtypes

# TensorFlow's kernels flush subnormal inputs and outputs to zero (tsl::port::ScopedFlushDenormal). This includes the
# float32 and float64 numbers to which 16-bit numbers are converted; subnormal float16 numbers are normal there. XLA
# does the same on the CPU. The CPU kernels of rmsnorm, which eager TensorFlow and JAX use for rows, do not.
FLUSHED = {"tf": ("bfloat16", "float32", "float64"), "flax": ("bfloat16", "float32", "float64")}


def of_any_size(random: np.random.Generator, shape: tuple[int, ...], dtype: str, least: int, most: int) -> Any:
    """Random digits times powers of two from 2^least to 2^most: of one size in a row, near it, or of all sizes."""
    middle = random.integers(least, most + 1, (*shape[:-1], 1))
    powers = middle + random.choice([0, 3, most - least]) * random.uniform(-1, 1, shape)
    sizes = np.exp2(np.clip(np.rint(powers), least, most))
    with np.errstate(over="ignore"):
        return (random.uniform(1, 2, shape) * random.choice([-1, 1, 1], shape) * sizes).astype(dtype)


@pytest.mark.parametrize("dtype", dtypes.FLOATS)
def test_the_golden_is_the_nearest_number(dtype):
    """In 2500 bits, which show even the square of 2^-640 beside 1. If terms cancel, to 2^-98 of the terms."""
    random = np.random.default_rng(0)
    digits, minimum, last = FORMATS[dtype]
    # of float64 a product of three ratios, and its rounding error, must be normal numbers
    least, most = (-320, 320) if dtype == "float64" else (minimum - digits + 1, math.frexp(last)[1] - 2)
    for case in drawn(24):
        data = make(case, case.variants[0], dtype)
        x = of_any_size(random, data.x.shape, dtype, least, most)
        if data.call.eps and random.random() < 0.2:  # test_golden.py asks NaN from 0 / 0
            x[random.random(x.shape) < 0.3] = 0
        x = np.where(np.isnan(data.x), data.x, x)
        has_sum = data.residual is not None and data.call.eps > 0
        tangent = (np.nan_to_num(x.astype(np.float64)) / 2).astype(dtype)  # so that the derivative has the size of y
        data = replace(
            data, x=x, gate=None, residual=data.residual if has_sum else None, dh=data.dh if has_sum else None,
            dy=of_any_size(random, x.shape, data.dy.dtype, -3, 3), tangents=(tangent, *data.tangents[1:]),
        )  # fmt: skip
        with mp.workprec(2500):
            check(data, slack=2.0**-98)


@pytest.mark.parametrize(("variant", "dtype", "size"), [
    ("standard", "float32", 1e26), ("standard", "bfloat16", 1e26), ("zhang_torch", "float32", 1e37),
    ("x_transformers", "float32", 1e37), ("paper", "float32", 1e-37), ("paper", "bfloat16", 1e-30),
    ("paper", "float64", 1e-300), ("standard", "float64", 1e300),
])  # fmt: skip
def test_rows_whose_squares_leave_the_range_of_the_recipe(framework, variant, dtype, size):
    """Over an axis that no kernel computes. Beyond these sizes, which docs/exactness.md names, they may be wrong."""
    random = np.random.default_rng(0)
    unit = random.uniform(0.5, 3, (4096, 3)) * random.choice([-1, 1], (4096, 3))
    y = framework.rms_norm((size * unit).astype(dtype), variant=variant, axis=0)
    want = unit / np.sqrt(np.mean(unit**2, axis=0))
    assert np.allclose(y.astype("float64"), want, rtol=2e-2 if dtype == "bfloat16" else 1e-5, atol=0)


@pytest.mark.parametrize("dtype", dtypes.FLOATS)
def test_subnormal_numbers_are_numbers_where_they_are_kept(framework, dtype):
    """If a framework stops to flush them, this test fails. In many rows, as XLA's own threads would flush them."""
    digits, minimum, _ = FORMATS[dtype]
    least = 2.0 ** (minimum - digits + 1)
    x = (np.array([[3.0, 4.0, 100.0, 7.0]] * 2**15) * least).astype(dtype)
    g = (np.array([100.0, 50.0, 30.0, 77.0]) * least).astype(dtype)
    whole = np.array([[1.0, 2.0, 3.0, 4.0]] * 2**15).astype(dtype)
    flushed = dtype in FLUSHED.get(framework.name, ()) and (dtype == "float64" or not cpu.is_available())
    for arguments in ((x,), (whole, g)):  # subnormal x, subnormal gains
        got, want = (f(*arguments, variant="paper") for f in (framework.rms_norm, rms_norm))
        units = 4 if dtype == "float64" and framework.name != "numpy" else 0
        assert (ulps(got, want).max() <= units) == (not flushed), dtype
