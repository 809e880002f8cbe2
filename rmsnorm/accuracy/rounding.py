"""float64 to any of the four formats, in one rounding: a cast of NumPy rounds to bfloat16 through float32."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def cast(x: Array, dtype: str) -> Array:
    """float64 to a dtype in one rounding.

    >>> cast(np.array([1 + 2.0**-8 + 2.0**-40]), "bfloat16").astype(float)  # through float32 it would become 1
    array([1.0078125])
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return _odd(x).astype(ml_dtypes.bfloat16) if dtype == "bfloat16" else x.astype(dtype)


def rounded(x: Any, dtype: str) -> Array:
    """An array in that dtype, as float64."""
    return cast(x, dtype).astype(np.float64)


def _odd(x: Array) -> Array:
    """float64 as float32, of the two numbers beside it the one whose last bit is 1: a second rounding goes its way."""
    near = np.asarray(x, np.float64).astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.int32)
    is_even = (back != x) & (bits & 1 == 0)
    return np.where(is_even, bits + np.where(np.abs(back) > np.abs(x), -1, 1), bits).astype(np.int32).view(np.float32)
