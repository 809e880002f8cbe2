"""Properties of the golden in random calls; and of every framework: powers of two, and subnormal numbers."""

from __future__ import annotations

import numpy as np
import pytest
from golden.oracle import FORMATS, check
from golden.random_calls import FLUSHED, PROFILE, calls
from hypothesis import assume, given
from mpmath import mp

from rmsnorm import cpu
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.numpy_impl import rms_norm
from rmsnorm.specification import dtypes


@PROFILE
@given(data=calls("numpy"))
def test_the_golden_is_the_nearest_number(data):
    """In 2500 bits, which show even the square of 2^-640 beside 1. If terms cancel, to 2^-98 of the terms."""
    assume(data.x.size)
    if data.call.eps == 0:  # test_golden.py tests NaN from 0 / 0
        assume(data.residual is None and (data.x != 0).all())
    with mp.workprec(2500):
        check(data, slack=2.0**-98)


@pytest.mark.parametrize("dtype", dtypes.FLOATS)
def test_without_eps_a_power_of_two_changes_nothing_in_any_framework(framework, dtype):
    random = np.random.default_rng(0)
    x, v = (random.normal(size=(3, 7)).astype(dtype) for _ in range(2))
    g = random.normal(size=7).astype(dtype)
    want = [framework.rms_norm(x, g, variant="paper"), *framework.rms_norm_vjp(v, x, g, variant="paper")[:2]]
    for power in (-5, 1, 4):
        factor = x.dtype.type(2.0**power)
        y, (dx, dscale, _) = (
            framework.rms_norm(factor * x, g, variant="paper"),
            framework.rms_norm_vjp(v, factor * x, g, variant="paper"),
        )
        for got, expected in zip((y, (dx * factor).astype(dtype), dscale), want, strict=True):
            assert dtype == "float16" or got.tobytes() == expected.tobytes()
            assert np.allclose(got.astype(np.float64), expected.astype(np.float64), rtol=0, atol=2.0**-10)


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
