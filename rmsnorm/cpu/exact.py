"""The forward pass where x or y is float64: scaled by a power of two, with what each operation rounds off.

Every row is scaled for its statistic, and every element by itself for y. So nothing overflows or underflows on the way,
and y is within one ulp. The backward pass is that of backward.py.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from rmsnorm.cpu.formats import (
    LOAD,
    ROUND,
    STORE,
    add_product_in_any_order,
    apart,
    bits,
    finite,
    fma,
    inlined,
    sum_error,
    view,
)
from rmsnorm.cpu.settings import CLAMP, FORWARD, INSIDE, OUTSIDE, PARAMETERS, STORAGE
from rmsnorm.cpu.statistic import add_rows, group_of, is_counted, place, span
from rmsnorm.cpu.system import call_c, free, malloc, settings_at, table, word

_LEAST: Final = -(2**20)  # below every exponent
_X, _X_STEP, _RESIDUAL, _SCALE, _, _MASK, _MASK_STEP, _MASK_STRIDE, _Y, _H, _INVERSE_RMS, _, _ = range(len(FORWARD))


def compiled(x: str, y: str, norm: str, product: str, has_mask: bool, has_other: bool, has_bias: bool) -> Any:
    """As ``compiled`` of forward.py."""
    load, store, add = LOAD[x], STORE[y], STORE[x]
    like_x, like_y = STORAGE[x](0), STORAGE[y](0)
    before = norm != ""
    counts = is_counted if has_mask else _every_one
    round_norm, round_product = ROUND[norm or "float64"], ROUND[product or "float64"]

    def fill(h: Any, gain: Any, gain_error: Any, b: Any, inverse: float, rest: float, y: Any) -> None:
        """A row of y of ordinary numbers, of which no product leaves the range: 1 / rho = inverse + rest."""
        for j in range(h.size):
            number, lost = load(h[j]), 0.0
            if not before:  # the product with the gain comes first
                product = number * gain[j]
                lost = fma(number, gain[j], -product) + number * gain_error[j]
                number = product
            result = number * inverse
            lost = fma(number, inverse, -result) + (number * rest + lost * inverse)
            if before:
                result = round_product(round_norm(result + _correction(lost)) * gain[j])
                if has_bias:
                    result = round_product(result + b[j])
            elif has_bias:
                total = result + b[j]
                lost += sum_error(result, b[j], total)
                result = total + _correction(lost)
            else:
                result += _correction(lost)
            store(y, j, result)

    fill = apart(fill)

    def forward(settings: int, start: int, stop: int, prepared: int, _: int, arguments: int) -> int:
        s = settings_at(settings)
        n, first, variance, offset = s.n, s.k, s.variance, s.offset
        x, x_step, y = word(arguments, _X), word(arguments, _X_STEP), word(arguments, _Y)
        residual, h, inverse_rms = word(arguments, _RESIDUAL), word(arguments, _H), word(arguments, _INVERSE_RMS)
        mask, mask_step, scale = word(arguments, _MASK), word(arguments, _MASK_STEP), word(arguments, _SCALE)
        stride = word(arguments, _MASK_STRIDE) if mask else -1
        groups = s.groups
        start, stop, width = start * groups, stop * groups, n * groups
        row_bytes, y_bytes = n * s.x_bytes, n * s.y_bytes
        gain, b = view(prepared, width, 0.0), view(prepared + 8 * width, width, 0.0)
        memory = malloc(8 * (n + width))
        if memory == 0:
            return 1
        centred, gain_error = view(memory, n, 0.0), view(memory + 8 * n, width, 0.0)
        if not before:
            if scale:
                call_c(word(table(), PARAMETERS + s.scale), scale, memory + 8 * n, width, 0)
            for j in range(width):
                gain_error[j] = sum_error(offset, gain_error[j], gain[j]) if scale else 0.0
        low, high = span(np.float64, gain, width)
        moderate = low > 2.0**-200 and high < 2.0**200
        if has_bias:
            low, high = span(np.float64, b, width)
            moderate = moderate and low > 2.0**-200 and high < 2.0**200
        for i in range(start, stop):
            at = 8 * group_of(i, groups) * n
            gain, b = view(prepared + at, n, 0.0), view(prepared + at + 8 * width, n, 0.0)
            gain_error = view(memory + 8 * n + at, n, 0.0)
            h_row = view(x + place(i, groups, x_step, row_bytes), n, like_x)
            if has_other and residual:
                x_row, h_row = h_row, view(h + i * row_bytes, n, like_x)
                add_rows(load, add, x_row, view(residual + i * row_bytes, n, like_x), h_row)
            mask_row = view(mask + place(i, groups, mask_step, n * stride), n, np.uint8(0))
            low, high = span(load, h_row, n)
            k, largest = first, high
            if has_mask:
                k, largest = 0, 0.0
                for j in range(first):
                    if is_counted(mask_row, stride, j):
                        size = abs(load(h_row[j]))
                        largest = size if size > largest else largest
                        k += 1
            elif first < n:
                _, largest = span(load, h_row, first)
            power = _inverse_power(_longest(s, largest, k))  # neither squares nor eps then leave the range
            total, lost, centring_error = 0.0, 0.0, 0.0
            for j in range(n):
                centred[j] = value = load(h_row[j]) * power if j < first and counts(mask_row, stride, j) else 0.0
                lost += sum_error(total, value, total + value) if has_mask else 0.0
                total += value
            largest *= power
            if has_mask and variance:  # the mean is a pair: a constant row has no variance
                size = float(k if k else 1)
                mean = total / size
                lost = (fma(-mean, size, total) + lost) / size
                for j in range(first):
                    if counts(mask_row, stride, j):
                        value = centred[j] - mean
                        error = sum_error(centred[j], -mean, value) - lost
                        centred[j] = value + error
                        centring_error += 2 * centred[j] * sum_error(value, error, centred[j])
                _, largest = span(np.float64, centred, n)
                again = _inverse_power(_longest(s, largest / power, k)) / power  # for what is left, so that eps counts
                again = again if again < 2.0**1000 else 2.0**1000
                for j in range(n):
                    centred[j] *= again
                largest, power, centring_error = largest * again, power * again, centring_error * again * again
            rho, rho_error = _rho(s, centred, largest, k, power, centring_error)
            if inverse_rms:
                reciprocal = 1 / rho
                reciprocal -= finite((fma(reciprocal, rho, -1.0) + reciprocal * rho_error) / rho)
                view(inverse_rms, stop, 0.0)[i] = reciprocal * power if k else 0.0
            if not y:
                continue
            y_row = view(y + i * y_bytes, n, like_y)
            if moderate and k and low > 2.0**-200 and high < 2.0**200 and 2.0**-200 < rho / power < 2.0**200:
                inverse = power / rho
                rest = (fma(-inverse, rho / power, 1.0) - inverse * (rho_error / power)) * inverse
                fill(h_row, gain, gain_error, b, inverse, rest, y_row)
                continue
            unit = _exponent(power)
            for j in range(n):  # h, the gain and the bias without their powers of two, which are in ``exponent``
                value = load(h_row[j])
                exponent = _exponent(value)
                value = _fraction(value)
                normalised = value / rho
                lost = -finite((fma(normalised, rho, -value) + normalised * rho_error) / rho)
                exponent += unit
                if before:
                    result = round_product(round_norm(_scaled(normalised + _correction(lost), exponent)) * gain[j])
                    if has_bias:
                        result = round_product(result + b[j])
                else:
                    factor, of_gain = _fraction(gain[j]), _exponent(gain[j])
                    result = normalised * factor
                    lost = lost * factor + fma(normalised, factor, -result)
                    lost += normalised * _scaled(gain_error[j], -of_gain)
                    exponent += of_gain
                    if has_bias:
                        of_bias = _exponent(b[j]) if b[j] != 0 else _LEAST
                        top = exponent if result != 0 and exponent > of_bias else of_bias
                        scaled, shift = _scaled(result, exponent - top), _scaled(_fraction(b[j]), of_bias - top)
                        result = scaled + shift
                        lost = _scaled(lost, exponent - top) + sum_error(scaled, shift, result)
                        exponent = top
                    result = _scaled(result + _correction(lost), exponent)
                store(y_row, j, result if k else 0.0)
        free(memory)
        return 0

    return forward


@inlined
def _every_one(mask: Any, stride: int, j: int) -> Any:
    return True


@inlined
def _longest(s: Any, largest: float, k: int) -> Any:
    """The largest element, or what eps adds to rho where that is more."""
    length = s.eps
    if s.position == INSIDE:
        length = np.sqrt(s.eps)
    elif s.position == CLAMP:
        length = s.eps / np.sqrt(float(k if k else 1))
    return length if length > largest else largest


@inlined
def _inverse_power(length: float) -> Any:
    """A power of two that makes it about 1."""
    size = _power_of_two(length)
    size = 2.0**-1022 if size < 2.0**-1022 else size
    return 1 / (2.0**1022 if size > 2.0**1022 else size)


@inlined
def _rho(s: Any, centred: Any, largest: float, k: int, power: float, centring_error: float) -> Any:
    """rho of a row that was multiplied by a power of two, and its rounding error."""
    size = float(k if k else 1)
    total, total_error = _sum_of_squares(centred, largest)
    total_error += centring_error
    q = total / size
    q_error = finite((total_error - fma(q, size, -total)) / size)
    inside = s.eps * power * power if s.position == INSIDE else 0.0
    outside = s.eps * power if s.position == OUTSIDE else 0.0
    radicand = q + inside
    root = np.sqrt(radicand)
    rho = root + outside
    lost = sum_error(q, inside, radicand) + q_error - fma(root, root, -radicand)
    rho_error = finite(lost / (2 * root)) + sum_error(root, outside, rho)
    if s.position == CLAMP:
        size_root = np.sqrt(size)
        floor = s.eps * power / size_root
        if rho < floor:
            rho = floor
            lost = -fma(size_root, size_root, -size) / (2 * size_root)
            rho_error = -(fma(floor, size_root, -s.eps * power) + floor * lost) / size_root
    return rho, rho_error


@apart
def _sum_of_squares(numbers: Any, largest: float) -> Any:
    """The sum of squares, and what that rounded off, to 2^-75 of it: Rump, Ogita & Oishi 2008.

    The squares of the upper halves, which are exact, are cut at a grid so coarse that their sum is exact, too.
    """
    coarse = _power_of_two(largest * largest) * _power_of_two(float(numbers.size)) * 8
    coarse = 2.0**1000 if coarse > 2.0**1000 else coarse
    upper, lower = 0.0, 0.0
    for j in range(numbers.size):
        half = bits(bits(numbers[j]) & np.int64(-(2**27)))
        square = half * half
        part = (coarse + square) - coarse
        upper = add_product_in_any_order(1.0, part, upper)
        lower = add_product_in_any_order(1.0, (square - part) + (numbers[j] - half) * (numbers[j] + half), lower)
    total = upper + lower if math.isfinite(upper) else upper
    return total, finite(lower - (total - upper))


@inlined
def _power_of_two(number: float) -> Any:
    """2^e with 2^e <= number < 2^(e+1), 0 below the normal numbers, infinity for what is not finite."""
    return bits(bits(number) & np.int64(0x7FF0000000000000))


@inlined
def _correction(error: float) -> Any:
    """-0.0 for none, which added to a number changes nothing, not even the sign of a zero."""
    return error if math.isfinite(error) and error != 0 else -0.0


@inlined
def _exponent(number: float) -> Any:
    """e with 2^e <= |number| < 2^(e+1), 0 where it is 0 or not finite."""
    field = (bits(number) >> 52) & 0x7FF
    small = ((bits(number * 2.0**64) >> 52) & 0x7FF) - 64
    biased = field if field != 0 else small
    return 0 if number == 0 or field == 0x7FF else biased - 1023


@inlined
def _fraction(number: float) -> Any:
    """The number without that power of two."""
    kept = number if abs(number) >= 2.0**-1022 else number * 2.0**64
    one = bits((bits(kept) & np.int64(~0x7FF0000000000000)) | np.int64(0x3FF0000000000000))
    return one if number != 0 and math.isfinite(number) else number


@inlined
def _scaled(number: float, exponent: int) -> Any:
    """number * 2^exponent, of a number between 2^-100 and 2^100, rounded once."""
    first = -900 if exponent < -1000 else (900 if exponent > 1000 else 0)
    second = min(max(exponent - first, -1022), 1023)
    return number * bits(np.int64(first + 1023) << 52) * bits(np.int64(second + 1023) << 52)
