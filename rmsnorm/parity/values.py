"""The numbers of a case: rows of very different norm, outliers, extremes, a gate of both signs, tangents."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_MAGNITUDE: Final = {  # of x, such that its square leaves the range of float16, or that of the dtype and of float32
    "large": dict.fromkeys(("float16", "bfloat16", "float32", "float64"), 2e4),
    "small": dict.fromkeys(("float16", "bfloat16", "float32", "float64"), 2e-3),
    "huge": {"float16": 2e4, "bfloat16": 1e20, "float32": 1e20, "float64": 1e300},
    "tiny": {"float16": 2e-3, "bfloat16": 1e-30, "float32": 1e-30, "float64": 1e-300},
    "clamped": {"float16": 1e-4, "bfloat16": 1e-14, "float32": 1e-14, "float64": 1e-14},
}


def gate_of(shape: tuple[int, ...], dtype: str, random: np.random.Generator) -> Array:
    """Of both signs; every row has a 0, and what somebody may cut off.

    For z = 13.7 float32 can still tell f(z) from z, so that y is no tie; in float16 dy f(z) stays a normal number.
    """
    z = random.normal(0.5, 3.0, shape)
    for column, value in enumerate((0.0, 13.7, -20.0), start=1):
        z[..., column : column + 1] = value
    return np.clip(z, -4.0 if dtype == "float16" else None, 13.7).astype(dtype)


def values_of(
    kind: str, shape: tuple[int, ...], dtype: str, random: np.random.Generator, *, along_last: bool
) -> Array:  # fmt: skip
    """x of a kind of values, whose rows are along the last axis, or along all but the first."""
    x = signed(kind, random.normal(0.1, 1.0, shape))
    rows = (*shape[:-1], 1) if along_last else (shape[0],) + (1,) * (len(shape) - 1)
    if kind in _MAGNITUDE:
        spread = 10.0 ** random.uniform(-2.0, 0.0 if kind == "clamped" else 0.4, rows)
        limit = 6e4 if dtype == "float16" else np.inf
        x = np.clip(x * spread * _MAGNITUDE[kind][dtype], -limit, limit)
    elif kind == "constant":
        x = np.where(_row_numbers(rows) % 2 == 1, _outliers(shape, 2), 1.0) * 2.0 ** random.integers(-2, 3, rows)
    elif kind == "at_clamp":
        rows_of_5 = [(5, 0, 0, 0, 0), (0, -3, 4, 0, 0), (1, 2, -2, 4, 0), (2, 2, 2, 2, 3)]
        x = np.resize(rows_of_5, shape) * 2.0 ** np.resize([0, 0, 0, 0, -1, 1], rows)
    else:
        x *= 10.0 ** random.uniform(-3.5, 1.5, rows) if len(shape) > 1 else 0.01
    if kind == "rows" and along_last and len(shape) > 1 and shape[-1] > 1:
        x = _with_outliers(x)
    if kind == "zero_rows":
        x[:, ::2] = 0.0
    if kind == "non_finite":
        x[0, 3], x[1, 5], x[2, 7], x[2, 9] = np.nan, np.inf, -np.inf, np.inf
    x = np.clip(x, -6e4, 6e4).astype(dtype) if dtype == "float16" and kind == "rows" else x.astype(dtype)
    if kind == "zero_rows":  # a view that may be written to, unlike that of broadcast_to
        x = np.lib.stride_tricks.as_strided(x[:1].copy(), x.shape, (0, *x.strides[1:]))
    return x


def signed(kind: str, values: Array) -> Array:
    return np.abs(values) if kind == "one_sign" else values


def _with_outliers(x: Array) -> Array:
    """Of eight rows, two have one element 1000 times the others, one is positive and one is negative."""
    number, outliers = _row_numbers((*x.shape[:-1], 1)), _outliers(x.shape, 4)
    largest = np.max(np.abs(x), axis=-1, keepdims=True, initial=0.0)
    x = np.where((number % 4 == 0) & (outliers != 0), 1000 * largest * outliers, x)
    return np.where(number % 8 == 1, np.abs(x), np.where(number % 8 == 5, -np.abs(x), x))


def _outliers(shape: tuple[int, ...], every: int) -> Array:
    """1 or -1 at one place of each row, else 0. The place changes with every few rows: first, last, middle, another."""
    n, number = shape[-1], _row_numbers((*shape[:-1], 1))
    positions = np.choose(number // every % 4, [0, n - 1, n // 2, number * 7 % max(1, n)])
    return np.where(np.arange(n) == positions, np.where(number % 3 == 0, 1.0, -1.0), 0.0)


def _row_numbers(rows: tuple[int, ...]) -> Array:
    return np.arange(math.prod(rows)).reshape(rows)


def tangent_of(x: Array, random: np.random.Generator) -> Array:
    """Of the size of x in every row, so that the derivative along it is of the size of y."""
    wide = np.abs(x.astype(np.float64))
    rows = tuple(range(1, x.ndim)) or None
    size = np.max(wide, axis=rows, keepdims=True, initial=1e-4, where=np.isfinite(wide))
    return (random.uniform(-0.5, 0.5, x.shape) * size).astype(x.dtype)
