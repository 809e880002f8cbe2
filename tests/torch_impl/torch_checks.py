"""How near the golden tensors of PyTorch have to be."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch_arrays import to_numpy

from rmsnorm import dtypes
from rmsnorm.accuracy.ulps import ulps


def check_values(got: Any, want: Any, most: int | None = None, share: float = 0.999) -> None:
    """16 bits: float64 rounded once, another number than the golden's only next to a tie. 32 bits: likewise, but where
    a / rho is rounded before the scale a tie may move y by two. 64 bits: two ulps, what is carried along makes it none.
    """
    apart = ulps(to_numpy(got), want)
    assert apart.max(initial=0) <= (most if most is not None else 1 if want.dtype.itemsize == 2 else 2)
    assert (apart == 0).sum() >= share * apart.size


def check_gradient(got: Any, want: Any, terms: Any, count: int) -> None:
    """One ulp of the dtype, and what float64 rounds: an operation or addition each 2^-53 of the terms' absolute sum."""
    got = to_numpy(got)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    u, tiny = dtypes.unit_roundoff(want.dtype.name), dtypes.smallest_subnormal(want.dtype.name)
    got, want = got.astype(np.float64), want.astype(np.float64)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(all="ignore"):
        near = np.abs(got - want) <= 2 * u * np.abs(want) + tiny + count * 2.0**-53 * terms
    assert (same | near).all()
