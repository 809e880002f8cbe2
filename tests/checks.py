"""How near the golden results of the frameworks have to be, in NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from rmsnorm.accuracy.ulps import ulps
from rmsnorm.specification import dtypes


def check_values(got: Any, want: Any, most: int = 1, share: float = 0.999) -> None:
    """y is rounded once, from at least 53 bits: it is another number than the golden's only next to a tie.

    Where a / rho is rounded before the scale, a tie may move a y of 32 bits by two.
    """
    apart = ulps(got, want)
    assert apart.max(initial=0) <= most
    assert (apart == 0).sum() >= share * apart.size


def check_near(got: Any, want: Any, error: Any, least: float | None = None) -> None:
    """One rounding of each of the two to the dtype, and the error of the arithmetic before it.

    ``least`` is what a subnormal result may err by more; without it the smallest number of the dtype.
    """
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    dtype = want.dtype.name
    got, want = got.astype(np.float64), want.astype(np.float64)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(all="ignore"):
        rounding = 2 * dtypes.unit_roundoff(dtype) * np.abs(want)
        rounding = rounding + (dtypes.smallest_subnormal(dtype) if least is None else least)
        assert (same | (np.abs(got - want) <= rounding + error)).all()
