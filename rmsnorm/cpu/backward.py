"""The backward pass on rows in memory, compiled: float64 inside, each gradient rounded once.

    dx = (u - h / s <u, h / rho> / k) / rho + dh,    u = (o + scale) dy

with drho / dh = h / (k s). Addresses and rows are as in forward.py; here the address h is that of x without a residual.
``reassoc`` lets the compiler vectorise a sum. Only the functions that are nothing but a sum have it.
Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from rmsnorm.cpu import kernel
from rmsnorm.cpu.bfloat16 import backward_row
from rmsnorm.cpu.formats import load, store, view
from rmsnorm.cpu.forward import any_set, is_moderate
from rmsnorm.cpu.parameters import gains, write
from rmsnorm.cpu.settings import OUTSIDE
from rmsnorm.cpu.statistic import centre, is_counted, scaled_sum_of_squares, slope, statistic, sum_of_squares


@kernel
def backward(
    settings: Any, formats: Any, start: int, stop: int, prepared_gains: int, sums: int, h: int, h_step: int, scale: int,
    mask: int, mask_step: int, mask_stride: int, inverse_rms: int, dy: int, dh: int, dx: int, dscale: int, dbias: int,
) -> None:  # fmt: skip
    """Computes rows ``start`` to ``stop`` of dx, and the sums over these rows for dscale and dbias.

    The sums are left in float64 at the address ``sums``. If that is 0, these are all the rows there are, and dscale
    and dbias are written. Without inverse_rms, 1 / rho is computed again, which is meant for x of at most 32 bits.
    """
    s, (like_x, like_y) = settings[0], formats
    n, k = s.n, s.k
    gain = view(prepared_gains, n, 0.0) if prepared_gains else gains(s, scale)
    totals = np.empty((2 if dbias else 1, n)) if sums == 0 else view(sums, 2 * n, 0.0).reshape((2, n))
    totals[:] = 0.0
    single = s.single and is_moderate(gain)
    gain32, doubt = gain[: n * single].astype(np.float32), np.zeros((n + 7) // 8 * 8 * single, np.uint8)
    eights = doubt.view(np.uint64)
    dscale_sums, dbias_sums = totals[0], totals[-1, : n if dbias else 0]
    centred = np.empty(n if mask or s.variance else 0)
    for i in range(start, stop):
        h_row, dy_row = view(h + i * h_step, n, like_x), view(dy + i * n * s.y_bytes, n, like_y)
        dx_row = view(dx + i * n * s.x_bytes, n, like_x)
        dh_row = view(dh + i * n * s.x_bytes, n, like_x)
        if inverse_rms:
            factor = view(inverse_rms, stop, 0.0)[i]
        else:
            k, rho = statistic(s, h_row, mask + i * mask_step, mask_stride if mask else -1)
            factor = 1 / rho if k else 0.0
        if mask or s.variance:
            mask_row = view(mask + i * mask_step, n, np.uint8(0))
            stride = mask_stride if mask else -1
            k = centre(h_row, mask_row, stride, s.k, factor, s.variance, centred)
            inner = _inner_masked(h_row, dy_row, gain, mask_row, stride, k, factor, dscale_sums, dbias_sums)
            share = slope(s, k, factor, sum_of_squares(centred, n)) * inner / max(k, 1)
            if dx:
                for j in range(n):
                    counts = k and is_counted(mask_row, stride, j)
                    gradient = factor * (load(dy_row[j]) * gain[j] - centred[j] * share) if counts else 0.0
                    store(dx_row, j, gradient + load(dh_row[j]) if dh else gradient)
            continue
        inner = _inner(h_row, dy_row, gain, factor, dscale_sums)
        for j in range(dbias_sums.size):
            dbias_sums[j] += load(dy_row[j])
        length = scaled_sum_of_squares(h_row, k, factor) if s.position == OUTSIDE else 0.0
        share = slope(s, k, factor, length) * inner / k
        if not dx:
            continue
        if dh:
            for j in range(k):
                gradient = factor * (load(dy_row[j]) * gain[j] - load(h_row[j]) * factor * share)
                store(dx_row, j, gradient + load(dh_row[j]))
            for j in range(k, n):
                store(dx_row, j, factor * (load(dy_row[j]) * gain[j]) + load(dh_row[j]))
        elif single and s.y_bytes == 2 and k == n and 2.0**-20 < factor < 2.0**20 and abs(share) < 2.0**20:
            backward_row(h_row, dy_row, gain32, np.float32(factor), np.float32(share), dx_row, doubt)
            for i8 in range(eights.size if any_set(eights) else 0):
                if eights[i8]:
                    _gradient(h_row, dy_row, gain, factor, share, dx_row, 8 * i8, min(8 * i8 + 8, n))
        else:
            _gradient(h_row, dy_row, gain, factor, share, dx_row, 0, k)
            for j in range(k, n):
                store(dx_row, j, factor * (load(dy_row[j]) * gain[j]))
    if sums == 0:
        write(dscale_sums, s.scale, dscale)
        write(dbias_sums, s.bias, dbias)


# The arguments of ``backward`` that are the caller's, in order: launch.py and xla.py pass them as one tuple.
ARGUMENTS: Final = backward.py_func.__code__.co_varnames[6 : backward.py_func.__code__.co_argcount]
_SCALE, _DSCALE, _DBIAS = (ARGUMENTS.index(name) for name in ("scale", "dscale", "dbias"))


@kernel
def backward_in_order(settings: Any, formats: Any, rows: int, step: int, arguments: Any) -> None:
    """Computes all rows on one thread, with the sums that many threads would give."""
    s = settings[0]
    gain, sums, total = gains(s, arguments[_SCALE]), np.empty((2, s.n)), np.zeros((2, s.n))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        backward(settings, formats, start, stop, gain.ctypes.data, sums.ctypes.data, *arguments)
        total += sums
    write(total[0], s.scale, arguments[_DSCALE])
    write(total[1], s.bias, arguments[_DBIAS])


@njit
def _gradient(h: Any, dy: Any, gain: Any, inverse_rms: float, share: float, dx: Any, start: int, stop: int) -> None:
    for j in range(start, stop):
        store(dx, j, inverse_rms * (load(dy[j]) * gain[j] - load(h[j]) * inverse_rms * share))


@njit(fastmath={"reassoc"})
def _inner(h: Any, dy: Any, gain: Any, inverse_rms: float, dscale_sums: Any) -> Any:
    """<u, h / rho>. Adds dy h / rho to the sums for dscale."""
    total = 0.0
    for j in range(gain.size):
        term = load(dy[j]) * (load(h[j]) * inverse_rms)
        dscale_sums[j] += term
        total += term * gain[j]
    return total


@njit
def _inner_masked(
    h: Any, dy: Any, gain: Any, mask: Any, stride: int, k: int, inverse_rms: float, dscale_sums: Any, dbias_sums: Any
) -> Any:
    """Likewise over the elements that the mask lets count. Adds dy to the sums for dbias."""
    total = 0.0
    for j in range(gain.size if k else 0):
        if is_counted(mask, stride, j):
            term = load(dy[j]) * (load(h[j]) * inverse_rms)
            dscale_sums[j] += term
            total += term * gain[j]
            if dbias_sums.size:
                dbias_sums[j] += load(dy[j])
    return total
