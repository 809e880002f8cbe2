"""A row of dx whose terms cancel, computed again in pairs of float64, whose arithmetic has 106 bits.

    dx = (u - c <u, h> / <c, c> + w c <u, h> / <c, c>) / rho,    u = (o + scale) dy

with c what the statistic squares and w the share of eps in rho. The first difference is what cancels: it is 0 for
n = 1, for u along c, and where only one element is not 0. What is below 2^-95 of its terms is 0, as in the golden.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rmsnorm.cpu.exact import _sum_error
from rmsnorm.cpu.formats import fma, inlined, view
from rmsnorm.cpu.settings import CLAMP, INSIDE, OUTSIDE
from rmsnorm.cpu.statistic import is_counted, rho_of
from rmsnorm.cpu.system import settings_at


def compiled() -> Any:
    return row


def row(settings: int, h_row: int, v_row: int, gains: int, mask_row: int, stride: int) -> int:
    """Writes dx in place of dy; all are float64."""
    s = settings_at(settings)
    n, first = s.n, s.k
    h, v, gain = view(h_row, n, 0.0), view(v_row, n, 0.0), view(gains, n, 0.0)
    mask = view(mask_row, n, np.uint8(0))
    k, mean, mean_error = 0, 0.0, 0.0
    for j in range(first):
        if is_counted(mask, stride, j):
            k += 1
            if s.variance:
                mean, mean_error = _plus(mean, mean_error, h[j], 0.0)
    size = float(k if k else 1)
    if s.variance:
        mean, mean_error = _over(mean, mean_error, size, 0.0)
    inner, inner_error, square, square_error = 0.0, 0.0, 0.0, 0.0
    for j in range(n):
        if is_counted(mask, stride, j):
            u = v[j] * gain[j]
            product, error = _times(u, fma(v[j], gain[j], -u), h[j], 0.0)
            inner, inner_error = _plus(inner, inner_error, product, error)
            if j < first:
                c, c_error = _plus(h[j], 0.0, -mean, -mean_error)
                product, error = _times(c, c_error, c, c_error)
                square, square_error = _plus(square, square_error, product, error)
    q = square / size
    rho = rho_of(s, q, k)
    share = 1.0 if s.position == CLAMP and np.sqrt(q) < rho else 0.0
    if s.position == INSIDE:
        share = s.eps / (q + s.eps)
    elif s.position == OUTSIDE:
        share = s.eps / rho
    along, along_error = _over(inner, inner_error, square, square_error) if square > 0 else (0.0, 0.0)
    for j in range(n):
        rest = 0.0
        if is_counted(mask, stride, j):
            rest = u = v[j] * gain[j]
            if j < first:
                c, c_error = _plus(h[j], 0.0, -mean, -mean_error)
                near, near_error = _times(c, c_error, along, along_error)
                rest, _ = _plus(u, fma(v[j], gain[j], -u), -near, -near_error)
                if abs(rest) <= 2.0**-95 * abs(near):
                    rest = 0.0
                rest += share * near
        v[j] = rest / rho
    return 0


@inlined
def _plus(a: float, a_error: float, b: float, b_error: float) -> Any:
    total = a + b
    error = _sum_error(a, b, total) + (a_error + b_error)
    return total + error, error - ((total + error) - total)


@inlined
def _times(a: float, a_error: float, b: float, b_error: float) -> Any:
    product = a * b
    error = fma(a, b, -product) + (a * b_error + a_error * b)
    return product + error, error - ((product + error) - product)


@inlined
def _over(a: float, a_error: float, b: float, b_error: float) -> Any:
    quotient = a / b
    rest = fma(-quotient, b, a) + (a_error - quotient * b_error)
    return quotient, rest / b
