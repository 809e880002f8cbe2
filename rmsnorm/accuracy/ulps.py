"""How far two arrays are apart, counted in representable numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rmsnorm.specification import errors

Array = npt.NDArray[Any]


def ulps(got: Array, want: Array) -> Array:
    """How many representable numbers lie between two arrays of one dtype, plus one; 0 where both are NaN.

    Raises:
        ValueError: the arrays differ in dtype or shape.

    Example:
        >>> float(ulps(np.float32([1.0]), np.nextafter(np.float32([1.0]), np.float32(2)))[0])
        1.0
    """
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        own, other = (errors.describe(array.shape, array.dtype.name) for array in (got, want))
        raise ValueError(f"ulps: got is {own}, expected {other} as want is; compare arrays of one dtype and shape")
    signed = np.dtype(f"i{want.dtype.itemsize}")
    steps = []
    for array in (got, want):
        bits = np.ascontiguousarray(array).view(signed).astype(np.int64)
        steps.append(np.where(bits < 0, int(np.iinfo(signed).min) - bits, bits))
    further, nearer = np.maximum(*steps), np.minimum(*steps)
    distance = (further.view(np.uint64) - nearer.view(np.uint64)).astype(np.float64)  # it may need all 64 bits
    nan = [np.isnan(array.astype(np.float64)) for array in (got, want)]
    return np.where(nan[0] & nan[1], 0.0, np.where(nan[0] | nan[1], np.inf, distance))
