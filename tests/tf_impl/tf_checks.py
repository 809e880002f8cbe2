"""How near the golden tensors of TensorFlow have to be."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from rmsnorm import dtypes
from rmsnorm.accuracy.ulps import ulps


def check_values(got: Any, want: Any, most: int = 1) -> None:
    """y is rounded once, from at least 53 bits: it is not the golden's only next to a tie, 1 time in 2^28 in f32."""
    apart = ulps(got.numpy(), want)
    assert apart.max(initial=0) <= most
    assert (apart == 0).sum() >= 0.999 * apart.size - (most > 1)


def check_near(got: Any, want: Any, terms: Any, count: int) -> None:
    """One rounding each of the two, and what the arithmetic rounds: its u of the terms' absolute sum for an operation.

    That is float64, but between 16 bits float32. TensorFlow's kernels take subnormal numbers as 0, which costs up to
    the smallest normal one; in f16 it does not.
    """
    got, dtype = got.numpy(), want.dtype.name
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    tiny = dtypes.smallest_subnormal(dtype) if dtype == "float16" else float(ml_dtypes.finfo(dtype).smallest_normal)
    got, want = got.astype(np.float64), want.astype(np.float64)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(all="ignore"):
        u = 2.0**-24 if dtype in dtypes.HALF else 2.0**-53
        near = np.abs(got - want) <= 2 * dtypes.unit_roundoff(dtype) * np.abs(want) + tiny + count * u * terms
    assert (same | near).all()
