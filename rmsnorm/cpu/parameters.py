"""The parameters in compiled code: gains are computed once for all rows, gradients are summed and written once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from rmsnorm.cpu import kernel
from rmsnorm.cpu.formats import BF16, F16, F32, grid, load, rounded, store, view


@njit
def gains(s: Any, scale: int) -> Any:
    """o + scale, rounded if the variant rounds each operation; 1 without a scale."""
    if scale == 0:
        return np.ones(s.n)
    gain = read(scale, s.scale, s.n)
    product = grid(s.product)
    for j in range(s.n if s.offset != 0 else 0):
        gain[j] = rounded(s.offset + gain[j], product) if s.before_scale else s.offset + gain[j]
    return gain


@kernel
def prepare(settings: Any, scale: int, gain: int) -> None:
    """Writes the gains to the address ``gain``, for many calls on parts of the rows."""
    view(gain, settings[0].n, 0.0)[:] = gains(settings[0], scale)


@kernel
def combine(settings: Any, sums: int, count: int, dscale: int, dbias: int) -> None:
    """Writes dscale and dbias: their sums over ``count`` chunks of rows, added from the first chunk to the last."""
    s = settings[0]
    total = np.zeros((2, s.n))
    for i in range(count):
        total += view(sums + i * s.n * 16, 2 * s.n, 0.0).reshape((2, s.n))
    write(total[0], s.scale, dscale)
    write(total[1], s.bias, dbias)


@njit
def read(address: int, code: int, n: int) -> Any:
    """A parameter in float64, from its address and the code of its format; empty if the address is 0."""
    values = np.empty(n if address else 0)
    if address == 0:
        return values
    if code == F16:
        _load_all(view(address, n, np.int16(0)), values)
    elif code == BF16:
        _load_all(view(address, n, np.uint16(0)), values)
    elif code == F32:
        _load_all(view(address, n, np.float32(0)), values)
    else:
        _load_all(view(address, n, 0.0), values)
    return values


@njit
def write(values: Any, code: int, address: int) -> None:
    """The reverse of ``read``: each value is rounded once."""
    n = values.size
    if address == 0:
        return
    if code == F16:
        _store_all(values, view(address, n, np.int16(0)))
    elif code == BF16:
        _store_all(values, view(address, n, np.uint16(0)))
    elif code == F32:
        _store_all(values, view(address, n, np.float32(0)))
    else:
        _store_all(values, view(address, n, 0.0))


@njit
def _load_all(source: Any, target: Any) -> None:
    for j in range(target.size):
        target[j] = load(source[j])


@njit
def _store_all(source: Any, target: Any) -> None:
    for j in range(target.size):
        store(target, j, source[j])
