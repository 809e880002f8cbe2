"""Rows whose gradient is 0, or a small difference of large terms: the bits of the golden, and what they cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cpu.test_cpu import ROUNDED, check_all_same

from rmsnorm import cpu
from rmsnorm import numpy_impl as golden
from rmsnorm.numpy_impl import fast

if not cpu.is_available():
    pytest.skip("there are no kernels here", allow_module_level=True)


def _rows(dtype: str, n: int) -> tuple[Any, Any]:
    """x, and a dy for which the gradient of x cancels: y, rounded; x; x times 3; and y with a few other elements."""
    rng = np.random.default_rng(n)
    x = np.repeat(rng.normal(size=(16, n)), 4, 0).astype(dtype)
    wide = x.astype("float64")
    dy = wide / np.sqrt((wide**2).mean(1, keepdims=True))
    dy[1::4], dy[2::4] = wide[1::4], 3 * wide[2::4]
    dy[3::4, :: max(n // 3, 1)] *= -1e-3
    return x, dy.astype(dtype)


@pytest.mark.parametrize("variant", ["standard", "gemma", "zhang_torch", "x_transformers"])
@pytest.mark.parametrize("dtype", ROUNDED)
def test_a_row_that_cancels_has_the_bits_of_the_golden(dtype: str, variant: str) -> None:
    for n in (1, 5, 33, 768):
        x, dy = _rows(dtype, n)
        offset = 1 if variant == "gemma" else 0
        for scale in (np.ones(n), np.random.default_rng(0).normal(1, 0.2, n)):
            gain = (scale - offset).astype(dtype)
            for eps in (0.0, 1e-6, 0.29):
                want = golden.rms_norm_vjp(dy, x, gain, variant=variant, eps=eps)
                check_all_same(fast.rms_norm_vjp(dy, x, gain, variant=variant, eps=eps), want)


@pytest.mark.parametrize("dtype", ROUNDED)
def test_a_row_without_a_gradient_has_zeros(dtype: str) -> None:
    """+0, whatever the signs in dy, unless a number beside it is not finite: then the product with 0 is a NaN."""
    x = np.random.default_rng(0).normal(size=(6, 40)).astype(dtype)
    dy = np.zeros(x.shape, dtype)
    dy[1], dy[2, 3], dy[3] = -dy[1], 1, x[3]
    for scale in (np.ones(40, dtype), np.zeros(40, dtype)):
        got = fast.rms_norm_vjp(dy, x, scale)
        check_all_same(got, golden.rms_norm_vjp(dy, x, scale))
        assert not np.signbit(got[0][[0, 1, 4, 5]].astype(float)).any()
    wrong = x.copy()
    wrong[0, 5], wrong[1, 6] = np.inf, np.nan
    check_all_same(fast.rms_norm_vjp(dy, wrong, scale), golden.rms_norm_vjp(dy, wrong, scale))
    scale[7] = np.inf
    got = fast.rms_norm_vjp(dy, x, scale)
    assert np.isnan(got[0][0].astype(float)).any()
    check_all_same(got, golden.rms_norm_vjp(dy, x, scale))
