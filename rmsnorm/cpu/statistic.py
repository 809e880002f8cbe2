"""A row in compiled code: h = x + residual, its statistic rho, and what the derivative of rho needs.

``load`` and ``store`` are those of formats.py for the format of the row.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from rmsnorm.cpu.formats import add_product_in_any_order, apart, bits, fma, inlined, sum_error
from rmsnorm.cpu.settings import INSIDE, OUTSIDE

_INFINITE: Final = np.int64(0x7FF0000000000000)


@inlined
def group_of(i: int, groups: int) -> Any:
    """Which group of its row the i-th group is."""
    return 0 if groups == 1 else i % groups


@inlined
def place(i: int, groups: int, step: int, width: int) -> Any:
    """How many bytes after the first row a group of so many bytes begins. A step leads from a row to the next."""
    return i * step if groups == 1 else i // groups * step + i % groups * width


@inlined
def add_rows(load: Any, store: Any, x: Any, residual: Any, h: Any) -> None:
    for j in range(h.size):
        store(h, j, load(x[j]) + load(residual[j]))


@inlined
def is_counted(mask: Any, stride: int, j: int) -> Any:
    """Whether an element counts. A negative stride means that there is no mask."""
    return stride < 0 or mask[j * stride] != 0


@apart
def span(load: Any, numbers: Any, k: int) -> Any:
    """The least of the first k numbers that is not 0, else infinity, and the largest; both without their signs."""
    low, high = _INFINITE, np.int64(0)
    for j in range(k):
        size = bits(abs(load(numbers[j])))  # in the same order as the numbers
        high = size if size > high else high
        size = size if size != 0 else _INFINITE
        low = size if size < low else low
    return bits(low), bits(high)


@apart
def sum_of_squares(load: Any, h: Any, k: int) -> Any:
    total = 0.0
    for j in range(k):
        total = add_product_in_any_order(load(h[j]), load(h[j]), total)
    return total


@apart
def scaled_sum_of_squares(load: Any, h: Any, k: int, factor: float) -> Any:
    total = 0.0
    for j in range(k):
        total = add_product_in_any_order(load(h[j]) * factor, load(h[j]) * factor, total)
    return total


@inlined
def masked_mean_square(load: Any, h: Any, mask: Any, stride: int, first: int, variance: bool) -> Any:
    """How many of the first elements count, and the mean square of these, about their mean or about 0."""
    k, total = 0, 0.0
    for j in range(first):
        if is_counted(mask, stride, j):
            k += 1
            total += load(h[j])
    size = k if k else 1
    mean = total / size if variance else 0.0
    total = 0.0
    for j in range(first):
        if is_counted(mask, stride, j):
            total += (load(h[j]) - mean) * (load(h[j]) - mean)
    return k, total / size


def mean_square_of(load: Any, has_mask: bool) -> Any:
    """The function that counts the elements of the statistic and takes their mean square.

    Without a mask these are the first elements of a row.
    """

    @inlined
    def mean_square(h: Any, mask: Any, stride: int, first: int, variance: bool) -> Any:
        if has_mask:
            k, q = masked_mean_square(load, h, mask, stride, first, variance)
        else:
            k, q = first, sum_of_squares(load, h, first) / first
        return k, q

    return mean_square


@apart
def rho_of(s: Any, q: float, k: int, power: float = 1.0) -> Any:
    """rho of the mean square of k elements, all of them multiplied by a power of two."""
    if s.position == INSIDE:
        root = np.sqrt(q + s.eps * power * power)
    elif s.position == OUTSIDE:
        root = np.sqrt(q) + s.eps * power
    else:
        root = np.sqrt(q)
        floor = s.eps * power / np.sqrt(k if k else 1)
        if root < floor:
            root = floor
    return root


@apart
def slope(s: Any, k: int, inverse_rms: float, length: float) -> Any:
    """rho / s, with drho / dh = h / (k s): 1 for eps inside, rho / (rho - eps) outside, 1 or 0 for a clamp.

    For eps outside it comes from ``length``, the squared length of h / rho: rho - eps is the root of the mean square.
    """
    size = k if k else 1
    result = 1.0
    if s.position == OUTSIDE:
        result = 1 / np.sqrt(length / size) if length / size > 0 else 0.0
    elif s.position != INSIDE:
        result = 1.0 if inverse_rms * s.eps / np.sqrt(size) < 1 - 2.0**-50 else 0.0  # 1 / rho is rounded
    return result


@inlined
def centre(
    load: Any, h: Any, mask: Any, stride: int, first: int, inverse_rms: float, variance: bool, centred: Any
) -> Any:
    """How many elements count. Writes into ``centred`` what the statistic squares of h / rho, 0 where not counted."""
    k, total, lost = 0, 0.0, 0.0
    power = 2.0 ** -np.floor(np.log2(inverse_rms))
    for j in range(centred.size):
        counts = j < first and is_counted(mask, stride, j)
        centred[j] = value = load(h[j]) / power if counts else 0.0  # exactly: a constant row has no variance
        lost += sum_error(total, value, total + value)
        total += value
        k += counts
    if variance and k:  # what is left of an element near the mean is a difference: the mean is a pair
        mean = total / k
        lost = (fma(-mean, float(k), total) + lost) / k
        for j in range(first):
            if is_counted(mask, stride, j):
                difference = centred[j] - mean
                centred[j] = difference + (sum_error(centred[j], -mean, difference) - lost)
    for j in range(first):
        centred[j] *= inverse_rms * power
    return k
