"""The forward pass on rows in memory, compiled: float64 inside, rounded once wherever the variant rounds.

    y = h / rho * (o + scale) + bias,    h = x + residual

An address is an integer, and 0 if there is no such array. Rows of residual, y and h follow each other without a gap.
Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import binding
from numba import njit, types
from numba.extending import overload

from rmsnorm.cpu import exact, kernel
from rmsnorm.cpu.bfloat16 import forward_row, forward_row_before
from rmsnorm.cpu.formats import F32, F64, fma, grid, load, rounded, store, view
from rmsnorm.cpu.parameters import gains, read
from rmsnorm.cpu.statistic import add_rows, statistic

_FMA: Final = binding.get_host_cpu_features().get("fma", True)  # only x86 names this feature


@kernel
def forward(
    settings: Any, formats: Any, start: int, stop: int, prepared_gains: int,
    x: int, x_step: int, residual: int, scale: int, bias: int, mask: int, mask_step: int, mask_stride: int,
    y: int, h: int, inverse_rms: int,
) -> None:  # fmt: skip
    """Computes rows ``start`` to ``stop`` of y, h = x + residual and 1 / rho.

    ``formats`` are a number of x's type and one of y's; only the types are read. ``prepared_gains`` is the address of
    the gains, or 0 if they are still to be computed. ``x_step`` and ``mask_step`` lead to the next row, ``mask_stride``
    to the next element, in bytes. Without y, only the others are computed.
    """
    _rows(
        settings[0], formats, start, stop, prepared_gains, x, x_step, residual, scale, bias, mask, mask_step,
        mask_stride, y, h, inverse_rms,
    )  # fmt: skip


# The arguments of ``forward`` that are the caller's, in order: launch.py and xla.py pass them as one tuple.
ARGUMENTS: Final = forward.py_func.__code__.co_varnames[5 : forward.py_func.__code__.co_argcount]


def _rows(
    s: Any, formats: Any, start: int, stop: int, prepared_gains: int,
    x: int, x_step: int, residual: int, scale: int, bias: int, mask: int, mask_step: int, mask_stride: int,
    y: int, h: int, inverse_rms: int,
) -> None:  # fmt: skip
    """With error terms if x or y is float64, else without: chosen when ``forward`` is compiled."""


@overload(_rows, strict=False)
def _choose_rows(
    s: Any, formats: Any, start: int, stop: int, prepared_gains: int,
    x: int, x_step: int, residual: int, scale: int, bias: int, mask: int, mask_step: int, mask_stride: int,
    y: int, h: int, inverse_rms: int,
) -> Any:  # fmt: skip
    return exact.forward_rows if types.float64 in formats.types else _rounded_rows


def _rounded_rows(
    s: Any, formats: Any, start: int, stop: int, prepared_gains: int,
    x: int, x_step: int, residual: int, scale: int, bias: int, mask: int, mask_step: int, mask_stride: int,
    y: int, h: int, inverse_rms: int,
) -> None:  # fmt: skip
    like_x, like_y = formats
    n = s.n
    gain = view(prepared_gains, n, 0.0) if prepared_gains else gains(s, scale)
    b = read(bias, s.bias, n)
    norm, product = grid(s.norm), grid(s.product)
    single = s.single and y != 0 and is_moderate(gain)
    gain32, doubt = gain[: n * single].astype(np.float32), np.zeros((n + 7) // 8 * 8 * single, np.uint8)
    eights = doubt.view(np.uint64)
    counts, rhos = np.zeros(2, np.int64), np.zeros(2)
    for i in range(start - s.prefetch, stop):
        next_i = i + s.prefetch
        if next_i < stop:
            h_row = view(x + next_i * x_step, n, like_x)
            if residual:
                residual_row = view(residual + next_i * n * s.x_bytes, n, like_x)
                h_row = add_rows(residual_row, h_row, view(h + next_i * n * s.x_bytes, n, like_x))
            mask_row = mask + next_i * mask_step
            counts[next_i & 1], rhos[next_i & 1] = statistic(s, h_row, mask_row, mask_stride if mask else -1)
            if inverse_rms:
                view(inverse_rms, stop, 0.0)[next_i] = 1 / rhos[next_i & 1] if counts[next_i & 1] else 0.0
        if i < start or not y:
            continue
        h_row = view(h + i * n * s.x_bytes if residual else x + i * x_step, n, like_x)
        y_row = view(y + i * n * s.y_bytes, n, like_y)
        k, rho = counts[i & 1], rhos[i & 1]
        reciprocal = 1 / rho if _FMA and s.scale != F64 and 1e-150 < rho < 1e150 else 0.0
        sure = single and 2.0**-20 < rho < 2.0**20
        if k == 0:
            for j in range(n):
                store(y_row, j, 0.0)
        elif sure and s.before_scale:
            forward_row_before(h_row, gain32, np.float32(1 / rho), y_row, doubt)
            for i8 in range(eights.size if any_set(eights) else 0):
                if eights[i8]:
                    _before_scale(h_row, gain, rho, reciprocal, norm, product, y_row, 8 * i8, min(8 * i8 + 8, n))
        elif sure:
            forward_row(h_row, gain32, np.float32(1 / rho), y_row, doubt)
            for i8 in range(eights.size if any_set(eights) else 0):
                if eights[i8]:
                    _after_scale(h_row, gain, rho, reciprocal, y_row, 8 * i8, min(8 * i8 + 8, n))
        elif s.before_scale and bias:
            for j in range(n):
                scaled = rounded(rounded(_quotient(load(h_row[j]), rho, reciprocal), norm) * gain[j], product)
                store(y_row, j, rounded(scaled + b[j], product))
        elif s.before_scale and s.norm == F32 and s.product == F32:
            for j in range(n):
                normalised = np.float32(_quotient(load(h_row[j]), rho, reciprocal))
                store(y_row, j, np.float64(normalised * np.float32(gain[j])))
        elif s.before_scale:
            _before_scale(h_row, gain, rho, reciprocal, norm, product, y_row, 0, n)
        elif bias:
            for j in range(n):
                store(y_row, j, _quotient(load(h_row[j]) * gain[j], rho, reciprocal) + b[j])
        else:
            _after_scale(h_row, gain, rho, reciprocal, y_row, 0, n)


@njit
def _after_scale(h: Any, gain: Any, rho: float, reciprocal: float, y: Any, start: int, stop: int) -> None:
    """The product with the gain comes first: it is exact up to 32 bits."""
    if reciprocal == 0:
        for j in range(start, stop):
            store(y, j, load(h[j]) * gain[j] / rho)
    else:
        for j in range(start, stop):
            store(y, j, _by_reciprocal(load(h[j]) * gain[j], rho, reciprocal))


@njit
def _before_scale(
    h: Any, gain: Any, rho: float, reciprocal: float, norm: Any, product: Any, y: Any, start: int, stop: int
) -> None:
    for j in range(start, stop):
        store(y, j, rounded(rounded(_quotient(load(h[j]), rho, reciprocal), norm) * gain[j], product))


@njit
def _quotient(number: float, rho: float, reciprocal: float) -> Any:
    """number / rho, by its reciprocal unless that is 0."""
    return number / rho if reciprocal == 0 else _by_reciprocal(number, rho, reciprocal)


@njit
def _by_reciprocal(number: float, rho: float, reciprocal: float) -> Any:
    """number / rho by a product and its remainder.

    It is as exact as a division and vectorises better, if nothing finite overflows.
    """
    product = number * reciprocal
    remainder = fma(-product, rho, number)  # NaN for an infinite number, for which any remainder is right
    return fma(remainder if remainder < 1e100 else 1e100, reciprocal, product)


@njit
def is_moderate(gain: Any) -> Any:
    """Whether a product with any of these gains underflows only where the result is next to nothing, too."""
    moderate = True
    for j in range(gain.size):  # a loop by index is vectorised
        size = abs(gain[j])
        moderate &= (size == 0) | ((size > 2.0**-40) & (size < 2.0**16))
    return moderate


@njit
def any_set(marks: Any) -> Any:
    union = np.uint64(0)
    for j in range(marks.size):
        union |= marks[j]
    return union != 0
