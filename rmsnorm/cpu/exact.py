"""The forward pass where x or y is float64: scaled by a power of two, with what each operation rounds off.

So nothing overflows or underflows on the way, and y is within one ulp. The backward pass is that of backward.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from rmsnorm.cpu.formats import bits, fma, grid, load, rounded, store, view
from rmsnorm.cpu.parameters import gains, read
from rmsnorm.cpu.settings import CLAMP, INSIDE, OUTSIDE
from rmsnorm.cpu.statistic import add_rows, is_counted


def forward_rows(
    s: Any, formats: Any, start: int, stop: int, prepared_gains: int,
    x: int, x_step: int, residual: int, scale: int, bias: int, mask: int, mask_step: int, mask_stride: int,
    y: int, h: int, inverse_rms: int,
) -> None:  # fmt: skip
    """Rows ``start`` to ``stop`` of y, h = x + residual and 1 / rho: compiled as a part of forward.py's ``forward``."""
    like_x, like_y = formats
    n = s.n
    gain, b = view(prepared_gains, n, 0.0) if prepared_gains else gains(s, scale), read(bias, s.bias, n)
    g = read(scale, s.scale, n)
    gain_error = np.zeros(n)
    if scale and not s.before_scale:
        for j in range(n):
            gain_error[j] = _sum_error(s.offset, g[j], gain[j])
    norm, product = grid(s.norm), grid(s.product)
    centred = np.empty(n)
    for i in range(start, stop):
        h_row = view(x + i * x_step, n, like_x)
        if residual:
            residual_row = view(residual + i * n * s.x_bytes, n, like_x)
            h_row = add_rows(residual_row, h_row, view(h + i * n * s.x_bytes, n, like_x))
        mask_row = view(mask + i * mask_step, n, np.uint8(0))
        k, power, rho, rho_error = _statistic(s, h_row, mask_row, mask_stride if mask else -1, centred)
        if inverse_rms:
            reciprocal = 1 / rho
            reciprocal -= _finite((fma(reciprocal, rho, -1.0) + reciprocal * rho_error) / rho)
            view(inverse_rms, stop, 0.0)[i] = reciprocal * power if k else 0.0
        if not y:
            continue
        y_row = view(y + i * n * s.y_bytes, n, like_y)
        for j in range(n):
            value = load(h_row[j]) * power
            normalised = value / rho
            lost = -_finite((fma(normalised, rho, -value) + normalised * rho_error) / rho)
            if s.before_scale:
                result = rounded(normalised + lost, norm) * gain[j]
                result = rounded(result, product)
                if bias:
                    result = rounded(result + b[j], product)
            else:
                result = normalised * gain[j]
                lost = lost * gain[j] + normalised * gain_error[j] + fma(normalised, gain[j], -result)
                if bias:
                    scaled = result
                    result = scaled + b[j]
                    lost += _sum_error(scaled, b[j], result)
                result += _finite(lost)
            store(y_row, j, result if k else 0.0)


@njit
def _statistic(s: Any, h: Any, mask: Any, stride: int, centred: Any) -> Any:
    """k, a power of two p, rho of h * p, and the rounding error of that. Writes what is squared into ``centred``."""
    k, largest = 0, 0.0
    for j in range(s.k):
        if is_counted(mask, stride, j):
            k += 1
            largest = max(largest, abs(load(h[j])))
    size = float(max(k, 1))
    length = s.eps
    if s.position == INSIDE:
        length = np.sqrt(s.eps)
    elif s.position == CLAMP:
        length = s.eps / np.sqrt(size)
    power = 1 / min(max(_power_of_two(max(largest, length)), 2.0**-1022), 2.0**1022)
    total = 0.0
    for j in range(s.n):
        centred[j] = load(h[j]) * power if j < s.k and is_counted(mask, stride, j) else 0.0
        total += centred[j]
    centring_error = 0.0  # an error in the mean itself changes q by its square alone
    if s.variance:
        mean = total / size
        for j in range(s.k):
            if is_counted(mask, stride, j):
                value = centred[j]
                centred[j] = value - mean
                centring_error += 2 * centred[j] * _sum_error(value, -mean, centred[j])
    total, total_error = _sum_of_squares(centred)
    total_error += centring_error
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
def _sum_of_squares(numbers: Any) -> Any:
    """The sum of squares, and what that rounded off, to 2^-75 of it: Rump, Ogita & Oishi 2008.

    The squares of the upper halves, which are exact, are cut at a grid so coarse that their sum is exact, too.
    """
    largest = 0.0
    for j in range(numbers.size):
        largest = max(largest, abs(numbers[j]))
    coarse = min(_power_of_two(largest * largest) * _power_of_two(float(numbers.size)) * 8, 2.0**1000)
    upper, lower = 0.0, 0.0
    for j in range(numbers.size):
        half = bits(bits(numbers[j]) & np.int64(-(2**27)))
        square = half * half
        part = (coarse + square) - coarse
        upper += part
        lower += (square - part) + (numbers[j] - half) * (numbers[j] + half)
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
