"""A row of dx whose terms cancel or leave the range, computed again in pairs of float64, whose arithmetic has 106 bits.

    dx = (u - c <u, h> / <c, c> + w c <u, h> / <c, c>) / rho,    u = (o + scale) dy

with c what the statistic squares and w the share of eps in rho. The first difference is what cancels: it is 0 for
n = 1, for u along c, and where only one element is not 0. What is below 2^-95 of its terms is 0, as in the golden.
Each number goes without its power of two, so that no product leaves the range of float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rmsnorm.cpu.exact import _LEAST, _exponent, _fraction, _inverse_power, _longest, _scaled
from rmsnorm.cpu.formats import LOAD, STORE, apart, finite, fma, sum_error, view
from rmsnorm.cpu.settings import INSIDE, OUTSIDE, STORAGE
from rmsnorm.cpu.statistic import is_counted, rho_of
from rmsnorm.cpu.system import free, malloc, settings_at


def compiled(x: str, y: str) -> Any:
    load_x, load_y, store = LOAD[x], LOAD[y], STORE[x]
    like_x, like_y = STORAGE[x](0), STORAGE[y](0)

    def cancelled(
        settings: int, h_row: int, dy_row: int, dh_row: int, gains: int, mask: int, stride: int, dx_row: int, sums: int
    ) -> int:
        """A row of dx, and its terms added to the sums for dscale, of those addresses that are not 0.

        Returns 1 if memory is short.
        """
        n = settings_at(settings).n
        h, dy, dh, dx = (
            view(h_row, n, like_x),
            view(dy_row, n, like_y),
            view(dh_row, n, like_x),
            view(dx_row, n, like_x),
        )
        memory, dscale = malloc(16 * n), view(sums, n, 0.0)
        if memory == 0:
            return 1
        wide, row = view(memory, n, 0.0), view(memory + 8 * n, n, 0.0)
        for j in range(n):
            wide[j], row[j] = load_x(h[j]), load_y(dy[j])
        _row(settings_at(settings), wide, row, view(gains, n, 0.0), view(mask, n, np.uint8(0)), stride)
        for j in range(n if sums else 0):
            dscale[j] += wide[j]
        for j in range(n if dx_row else 0):
            store(dx, j, (row[j] + load_x(dh[j]) if dh_row else row[j]) + 0.0)
        free(memory)
        return 0

    return cancelled


@apart
def _row(s: Any, h: Any, v: Any, gain: Any, mask: Any, stride: int) -> None:
    """Writes dx in place of dy, ``v``, and the terms of dscale in place of h; all are float64."""
    n, first = s.n, s.k
    k, largest, top, plain = 0, 0.0, _LEAST, True
    for j in range(n):
        if is_counted(mask, stride, j):
            if j < first:
                k += 1
                largest = abs(h[j]) if abs(h[j]) > largest else largest
            plain &= _is_moderate(h[j]) and _is_moderate(v[j]) and _is_moderate(gain[j])
    for j in range(0 if plain else n):
        if is_counted(mask, stride, j) and h[j] != 0 and v[j] != 0 and gain[j] != 0:
            exponent = _exponent(h[j]) + _exponent(v[j]) + _exponent(gain[j])
            top = exponent if exponent > top else top
    top = 0 if plain else top
    # c and, by another power, rho are near 1
    power = 1.0 if plain else _inverse_power(largest)
    size = float(k if k else 1)
    mean, mean_error = 0.0, 0.0
    if s.variance:
        for j in range(first):
            if is_counted(mask, stride, j):
                mean, mean_error = _plus(mean, mean_error, h[j] * power, 0.0)
        mean, mean_error = _over(mean, mean_error, size, 0.0)
        largest = 0.0
        for j in range(first):
            if is_counted(mask, stride, j):
                c, _ = _plus(h[j] * power, 0.0, -mean, -mean_error)
                largest = abs(c) if abs(c) > largest else largest
        largest /= power
    power_of_rho = 1.0 if plain else _inverse_power(_longest(s, largest, k))
    unit, unit_of_rho = _power(power, plain), _power(power_of_rho, plain)
    inner, inner_error, square, square_error = 0.0, 0.0, 0.0, 0.0
    for j in range(n):
        if is_counted(mask, stride, j):
            exponent = _power(h[j], plain) + _power(v[j], plain) + _power(gain[j], plain) - top
            a, b = _without(v[j], plain), _without(gain[j], plain)
            u = a * b
            product, error = _times(u, finite(fma(a, b, -u)), _without(h[j], plain), 0.0)
            inner, inner_error = _plus(
                inner, inner_error, _moved(product, exponent, plain), _moved(error, exponent, plain)
            )
            if j < first:
                c, c_error = _plus(h[j] * power, 0.0, -mean, -mean_error)
                product, error = _times(c, c_error, c, c_error)
                square, square_error = _plus(square, square_error, product, error)
    q, shift = square / size, unit_of_rho - unit
    root = np.sqrt(_moved(q, 2 * shift, plain))
    rho = rho_of(s, _moved(q, 2 * shift, plain), k, power_of_rho)
    share, kept, of_kept = 0.0, 1.0, 0  # w and 1 - w
    if s.position == INSIDE:
        share, kept, of_kept = s.eps * power_of_rho * power_of_rho / (rho * rho), q / (rho * rho), 2 * shift
    elif s.position == OUTSIDE:
        share, kept, of_kept = s.eps * power_of_rho / rho, np.sqrt(q) / rho, shift
    elif root < rho or rho == 0:
        share, kept = (1.0, 0.0) if rho > 0 else (np.nan, np.nan)
    along, along_error = 0.0 if math.isfinite(inner) else np.nan, 0.0
    if square > 0:
        along, along_error = _over(inner, inner_error, square, square_error)
    for j in range(n):
        if not is_counted(mask, stride, j):
            v[j] = h[j] = 0.0
        else:
            a, b = _without(v[j], plain), _without(gain[j], plain)
            u, of_u = a * b, _power(v[j], plain) + _power(gain[j], plain)
            term = _moved(
                a * _without(h[j], plain) / rho, _power(v[j], plain) + _power(h[j], plain) + unit_of_rho, plain
            )
            rest, of_rest = u, of_u
            if j < first:
                c, c_error, of_c = _without(h[j], plain), 0.0, _power(h[j], plain)
                if s.variance:
                    c, c_error = _plus(h[j] * power, 0.0, -mean, -mean_error)
                    of_c = -unit
                near, near_error = _times(c, c_error, along, along_error)
                whole = share <= 0.5 and math.isfinite(near)
                if not whole:
                    near, near_error = near * kept, near_error * kept
                shift = _power(near, plain)
                of_near = of_c + top + 2 * unit + shift + (0 if whole else of_kept)
                near, near_error = _moved(near, -shift, plain), _moved(near_error, -shift, plain)
                of_rest = of_near if near != 0 and (u == 0 or of_near > of_u) else of_u
                near, near_error = _moved(near, of_near - of_rest, plain), _moved(near_error, of_near - of_rest, plain)
                rest, error = _moved(u, of_u - of_rest, plain), _moved(finite(fma(a, b, -u)), of_u - of_rest, plain)
                rest, _ = _plus(rest, error, -near, -near_error)
                if whole:
                    if abs(rest) <= 2.0**-95 * abs(near):
                        rest = 0.0
                    rest += share * near
            v[j] = _moved(rest / rho, of_rest + unit_of_rho, plain)
            h[j] = term


@apart
def _is_moderate(number: float) -> Any:
    """So near to 1 that no product of five such numbers leaves the range."""
    return number == 0 or 2.0**-200 < abs(number) < 2.0**200


@apart
def _power(number: float, plain: bool) -> Any:
    return 0 if plain else _exponent(number)


@apart
def _without(number: float, plain: bool) -> Any:
    return number if plain else _fraction(number)


@apart
def _moved(number: float, exponent: int, plain: bool) -> Any:
    return number if plain else _scaled(number, exponent)


@apart
def _plus(a: float, a_error: float, b: float, b_error: float) -> Any:
    total = a + b
    error = sum_error(a, b, total) + (a_error + b_error)
    return total + error, finite(error - ((total + error) - total))


@apart
def _times(a: float, a_error: float, b: float, b_error: float) -> Any:
    product = a * b
    error = finite(fma(a, b, -product) + (a * b_error + a_error * b))
    return product + error, finite(error - ((product + error) - product))


@apart
def _over(a: float, a_error: float, b: float, b_error: float) -> Any:
    quotient = a / b
    return quotient, finite((fma(-quotient, b, a) + (a_error - quotient * b_error)) / b)
