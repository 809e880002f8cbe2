"""The forward pass where x or y is float64: scaled by a power of two, and what each operation rounds off carried along.

So nothing overflows or underflows on the way, and y is within one ulp. The backward pass is that of kernels.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from rmsnorm.cpu.formats import at, bits, fma, grid, load, rounded, store
from rmsnorm.cpu.kernels import CLAMP, INSIDE, OUTSIDE, _added, _is_counted, gains, kernel, parameter


@kernel
def forward(
    settings: Any, formats: Any, start: int, stop: int, ready: int,
    x: int, x_step: int, residual: int, scale: int, bias: int, mask: int, mask_step: int, mask_stride: int,
    y: int, h: int, inverse_rms: int,
) -> None:  # fmt: skip
    """Rows from start to stop of y, h = x + residual and 1 / rho."""
    s, (like_x, like_y) = settings[0], formats
    n = s.n
    gain, b = at(ready, n, 0.0) if ready else gains(s, scale), parameter(bias, s.bias, n)
    g = parameter(scale, s.scale, n)
    gain_error = np.zeros(n)
    if scale and not s.before_scale:
        for j in range(n):
            gain_error[j] = _sum_error(s.offset, g[j], gain[j])
    norm, product = grid(s.norm), grid(s.product)
    c = np.empty(n)
    for i in range(start, stop):
        a = at(x + i * x_step, n, like_x)
        if residual:
            a = _added(at(residual + i * n * s.x_bytes, n, like_x), a, at(h + i * n * s.x_bytes, n, like_x))
        counted = at(mask + i * mask_step, n, np.uint8(0))
        k, power, rho, rho_error = _statistic(s, a, counted, mask_stride if mask else -1, c)
        if inverse_rms:
            reciprocal = 1 / rho
            reciprocal -= _finite((fma(reciprocal, rho, -1.0) + reciprocal * rho_error) / rho)
            at(inverse_rms, stop, 0.0)[i] = reciprocal * power if k else 0.0
        if not y:
            continue
        out = at(y + i * n * s.y_bytes, n, like_y)
        for j in range(n):
            value = load(a[j]) * power
            normalised = value / rho
            lost = -_finite((fma(normalised, rho, -value) + normalised * rho_error) / rho)
            if s.before_scale:
                found = rounded(normalised + lost, norm) * gain[j]
                found = rounded(found, product)
                if bias:
                    found = rounded(found + b[j], product)
            else:
                found = normalised * gain[j]
                lost = lost * gain[j] + normalised * gain_error[j] + fma(normalised, gain[j], -found)
                if bias:
                    scaled = found
                    found = scaled + b[j]
                    lost += _sum_error(scaled, b[j], found)
                found += _finite(lost)
            store(out, j, found if k else 0.0)


@njit
def _statistic(s: Any, a: Any, mask: Any, stride: int, c: Any) -> Any:
    """k, a power of two p, rho of a * p, and what it lacks."""
    k, largest = 0, 0.0
    for j in range(s.k):
        if _is_counted(mask, stride, j):
            k += 1
            largest = max(largest, abs(load(a[j])))
    size = float(max(k, 1))
    length = s.eps
    if s.position == INSIDE:
        length = np.sqrt(s.eps)
    elif s.position == CLAMP:
        length = s.eps / np.sqrt(size)
    power = 1 / min(max(_power_of_two(max(largest, length)), 2.0**-1022), 2.0**1022)
    total = 0.0
    for j in range(s.n):
        c[j] = load(a[j]) * power if j < s.k and _is_counted(mask, stride, j) else 0.0
        total += c[j]
    off = 0.0  # q feels a mean that is slightly off by the square of that alone
    if s.variance:
        mean = total / size
        for j in range(s.k):
            if _is_counted(mask, stride, j):
                value = c[j]
                c[j] = value - mean
                off += 2 * c[j] * _sum_error(value, -mean, c[j])
    total, total_error = _sum_of_squares(c)
    total_error += off
    q = total / size
    q_error = _finite((total_error - fma(q, size, -total)) / size)
    inside = s.eps * power * power if s.position == INSIDE else 0.0
    outside = s.eps * power if s.position == OUTSIDE else 0.0
    radicand = q + inside
    root = np.sqrt(radicand)
    rho = root + outside
    lost = _sum_error(q, inside, radicand) + q_error - fma(root, root, -radicand)
    rho_error = _finite(lost / (2 * root)) + _sum_error(root, outside, rho)
    if s.position == CLAMP:
        size_root = np.sqrt(size)
        floor = s.eps * power / size_root
        if rho < floor:
            rho = floor
            lost = -fma(size_root, size_root, -size) / (2 * size_root)
            rho_error = -(fma(floor, size_root, -s.eps * power) + floor * lost) / size_root
    return k, power, rho, rho_error


@njit
def _sum_of_squares(c: Any) -> Any:
    """Sum of c^2, and what that rounded off, to 2^-75 of it: Rump, Ogita & Oishi 2008.

    The squares of the upper halves, which are exact, are cut at a grid so coarse that their sum is exact, too.
    """
    largest = 0.0
    for j in range(c.size):
        largest = max(largest, abs(c[j]))
    coarse = min(_power_of_two(largest * largest) * _power_of_two(float(c.size)) * 8, 2.0**1000)
    upper, lower = 0.0, 0.0
    for j in range(c.size):
        half = bits(bits(c[j]) & np.int64(-(2**27)))
        square = half * half
        part = (coarse + square) - coarse
        upper += part
        lower += (square - part) + (c[j] - half) * (c[j] + half)
    total = upper + lower if math.isfinite(upper) else upper
    return total, _finite(lower - (total - upper))


@njit
def _power_of_two(number: float) -> Any:
    """2^e with 2^e <= number < 2^(e+1), 0 below the normal numbers, infinity for what is not finite."""
    return bits(bits(number) & np.int64(0x7FF0000000000000))


@njit
def _sum_error(a: float, b: float, total: float) -> Any:
    """a + b - total, exactly: Knuth."""
    t = total - a
    return _finite((a - (total - t)) + (b - t))


@njit
def _finite(error: float) -> Any:
    return error if math.isfinite(error) else 0.0
