"""float64 to any of the four formats, in one rounding: a cast of NumPy rounds to bfloat16 through float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rmsnorm.numpy_impl.double_double import DoubleDouble

Array = npt.NDArray[Any]


def cast(x: Array, dtype: str) -> Array:
    """float64 to a dtype in one rounding."""
    return DoubleDouble(x).round(dtype)


def rounded(x: Any, dtype: str) -> Array:
    """An array in that dtype, as float64."""
    return cast(x, dtype).astype(np.float64)
