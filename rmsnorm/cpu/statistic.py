"""A row in compiled code: h = x + residual, its statistic rho, and what the derivative of rho needs.

``reassoc`` lets the compiler vectorise a sum. Only the functions that are nothing but a sum have it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from rmsnorm.cpu.formats import load, store, view
from rmsnorm.cpu.settings import INSIDE, OUTSIDE


@njit
def add_rows(residual: Any, x: Any, h: Any) -> Any:
    for j in range(h.size):
        store(h, j, load(x[j]) + load(residual[j]))
    return h


@njit
def statistic(s: Any, h: Any, mask: int, stride: int) -> Any:
    """How many elements of a row count, and rho. A negative stride means that there is no mask."""
    if stride < 0 and not s.variance:
        return s.k, _rho(s, sum_of_squares(h, s.k) / s.k, s.k)
    k, q = _mean_square(h, view(mask, s.n, np.uint8(0)), stride, s.k, s.variance)
    return k, _rho(s, q, k)


@njit
def is_counted(mask: Any, stride: int, j: int) -> Any:
    return stride < 0 or mask[j * stride] != 0


@njit(fastmath={"reassoc"})
def sum_of_squares(h: Any, k: int) -> Any:
    total = 0.0
    for j in range(k):
        total += load(h[j]) * load(h[j])
    return total


@njit(fastmath={"reassoc"})
def scaled_sum_of_squares(h: Any, k: int, factor: float) -> Any:
    total = 0.0
    for j in range(k):
        total += (load(h[j]) * factor) * (load(h[j]) * factor)
    return total


@njit
def _mean_square(h: Any, mask: Any, stride: int, first: int, variance: bool) -> Any:
    """How many of the first elements count, and the mean square of these, about their mean or about 0."""
    k, total = 0, 0.0
    for j in range(first):
        if is_counted(mask, stride, j):
            k += 1
            total += load(h[j])
    mean = total / max(k, 1) if variance else 0.0
    total = 0.0
    for j in range(first):
        if is_counted(mask, stride, j):
            total += (load(h[j]) - mean) * (load(h[j]) - mean)
    return k, total / max(k, 1)


@njit
def _rho(s: Any, q: float, k: int) -> Any:
    if s.position == INSIDE:
        return np.sqrt(q + s.eps)
    if s.position == OUTSIDE:
        return np.sqrt(q) + s.eps
    floor = s.eps / np.sqrt(max(k, 1))
    return floor if np.sqrt(q) < floor else np.sqrt(q)


@njit
def slope(s: Any, k: int, inverse_rms: float, length: float) -> Any:
    """rho / s with s = k rho drho / dh: 1 for eps inside, 1 or 0 for a clamp.

    For eps outside it comes from ``length``, the squared length of h / rho.
    """
    if s.position == INSIDE:
        return 1.0
    if s.position == OUTSIDE:
        return 1 / np.sqrt(length / max(k, 1)) if length > 0 else 0.0
    return 1.0 if inverse_rms * s.eps / np.sqrt(max(k, 1)) < 1 - 2.0**-50 else 0.0  # 1 / rho is rounded


@njit
def centre(h: Any, mask: Any, stride: int, first: int, inverse_rms: float, variance: bool, centred: Any) -> Any:
    """How many elements count. Writes into ``centred`` what the statistic squares of h / rho, 0 where not counted."""
    k, total = 0, 0.0
    for j in range(centred.size):
        counts = j < first and is_counted(mask, stride, j)
        centred[j] = load(h[j]) * inverse_rms if counts else 0.0
        total += centred[j]
        k += counts
    if variance and k:
        for j in range(first):
            if is_counted(mask, stride, j):
                centred[j] -= total / k
    return k
