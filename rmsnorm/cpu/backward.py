"""The backward pass on rows in memory, compiled: float64 inside, each gradient rounded once.

    dx = (u - h / s <u, h / rho> / k) / rho + dh,    u = (o + scale) dy

with drho / dh = h / (k s). Addresses, rows and what is compiled are as in forward.py; the address h is that of x
without a residual. Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from rmsnorm.cpu.bfloat16 import any_set, backward_row, is_moderate
from rmsnorm.cpu.exact import _exponent
from rmsnorm.cpu.formats import LOAD, STORE, add_product_in_any_order, apart, bits, inlined, multiply_add, view
from rmsnorm.cpu.settings import BACKWARD, F64, OUTSIDE, STORAGE, cancelled_place
from rmsnorm.cpu.statistic import (
    centre,
    is_counted,
    masked_mean_square,
    rho_of,
    scaled_sum_of_squares,
    slope,
    sum_of_squares,
)
from rmsnorm.cpu.system import LINE, aligned, call_c, free, malloc, settings_at, table, word

# What cancelled.py computes again: a row whose u is along h, as its first elements that are not 0 show, and one with an
# element that is so small a part of its terms that its bits could be wrong, which is rare by chance. It also computes
# rows of float64, or with a gain of it, whose numbers are so large or small that a product may leave the range.
_SAMPLE: Final = 16
_PARALLEL: Final = 2.0**-8
_CANCELS: Final = 2.0**-24
_FAR: Final = 400  # of exponents: so far from 0 a product of two such numbers is within the range
_INFINITE: Final = np.int64(0x7FF0000000000000)
_MAY_CANCEL: Final = 2.0**-16  # with a mask, where rows are not tested

_H, _H_STEP, _, _MASK, _MASK_STEP, _MASK_STRIDE, _INVERSE_RMS, _DY, _DH, _DX, _, _DBIAS = range(len(BACKWARD))


def compiled(x: str, y: str, *options: str) -> Any:
    """The kernel for the formats of x and y, with what the options name (see machine_code.py)."""
    has_mask, has_other = "mask" in options, "other" in options
    load_x, load_y, store = LOAD[x], LOAD[y], STORE[x]
    like_x, like_y = STORAGE[x](0), STORAGE[y](0)
    may_be_single = x == y == "bfloat16" and not (has_mask or has_other)
    is_wide = "float64" in (x, y)
    settle = cancelled_place(x, y)

    def fill(h: Any, dy: Any, dh: Any, gain: Any, factor: float, step: float, dx: Any, first: Any, last: Any) -> Any:
        """Elements ``first`` to ``last`` of a row of dx: unsigned, as numba lets a signed index count from the end.

        Returns whether one of them is a small difference of large terms.
        """
        cancels = False
        for j in range(first, last):
            near = load_x(h[j]) * step
            rest = multiply_add(load_y(dy[j]), gain[j], -near)
            gradient = multiply_add(factor, rest, 0.0)  # a zero becomes +0
            store(dx, j, gradient + load_x(dh[j]) + 0.0 if has_other else gradient)
            if not is_wide:
                cancels |= abs(rest) < _CANCELS * abs(near)
        return cancels

    fill = (apart if may_be_single else inlined)(fill)  # it is called in one or in two places

    def span(load: Any, numbers: Any, mask: Any, stride: int) -> Any:
        """The exponents of the smallest number that is not 0 and of the largest one, of those that count."""
        low, high = _INFINITE, np.int64(0)
        for j in range(numbers.size):
            if not has_mask or is_counted(mask, stride, j):
                size = bits(abs(load(numbers[j])))
                high = size if size > high else high
                size = size if size != 0 else _INFINITE
                low = size if size < low else low
        return ((low >> 52) - 1023, (high >> 52) - 1023) if high else (np.int64(0), np.int64(0))

    span = inlined(span)

    def backward(settings: int, start: int, stop: int, prepared: int, sums: int, arguments: int) -> int:
        """Computes rows ``start`` to ``stop`` of dx, and the sums over these rows for dscale and dbias at ``sums``.

        Without 1 / rho this is computed again, which is meant for x of at most 32 bits. Returns 1 if memory is short.
        """
        s = settings_at(settings)
        n, k, variance = s.n, s.k, s.variance
        h, h_step, dy, dh = word(arguments, _H), word(arguments, _H_STEP), word(arguments, _DY), word(arguments, _DH)
        dx, inverse_rms, mask = word(arguments, _DX), word(arguments, _INVERSE_RMS), word(arguments, _MASK)
        mask_step, stride = word(arguments, _MASK_STEP), word(arguments, _MASK_STRIDE) if mask else -1
        row_bytes, y_bytes = n * s.x_bytes, n * s.y_bytes
        gain, dscale_sums = view(prepared, n, 0.0), view(sums, n, 0.0)
        dbias_sums = view(sums + 8 * n, n, 0.0)
        has_bias, has_rms = word(arguments, _DBIAS) != 0, inverse_rms != 0
        for j in range(2 * n if has_bias else n):
            dscale_sums[j] = 0.0
        if has_mask:
            memory = malloc(8 * n)
            if memory == 0:
                return 1
            centred = view(memory, n, 0.0)
        if may_be_single:
            eight = (n + 7) // 8
            memory = malloc(LINE + 4 * n + LINE + 8 * eight)
            if memory == 0:
                return 1
            gain32 = view(aligned(memory), n, np.float32(0))
            marks = aligned(aligned(memory) + 4 * n)
            eights, doubt = view(marks, eight, np.uint64(0)), view(marks, n, np.uint8(0))
            eights[eight - 1] = 0  # its last elements are none of the row
            for j in range(n):
                gain32[j] = gain[j]
            single = s.single and k == n and is_moderate(gain)
        failed, least, most = 0, np.int64(0), np.int64(0)
        is_wild: Any = False
        if s.scale == F64:
            for j in range(n):
                of_gain = _exponent(gain[j])
                least = of_gain if of_gain < least else least
                most = of_gain if of_gain > most else most
                if not abs(gain[j]) < np.inf:
                    is_wild = True
            is_wild = is_wild or least < -_FAR or most > _FAR
        for i in range(start, stop):
            h_row, dy_row = view(h + i * h_step, n, like_x), view(dy + i * y_bytes, n, like_y)
            dx_row, dh_row = view(dx + i * row_bytes, n, like_x), view(dh + i * row_bytes, n, like_x)
            mask_row = view(mask + i * mask_step, n, np.uint8(0))
            h_at, dy_at, mask_at = h + i * h_step, dy + i * y_bytes, mask + i * mask_step
            dh_at = dh + i * row_bytes if dh else 0
            dx_at = dx + i * row_bytes if dx else 0
            if has_rms:
                factor = view(inverse_rms, stop, 0.0)[i]
            else:
                if has_mask:
                    k, q = masked_mean_square(load_x, h_row, mask_row, stride, s.k, variance)
                else:
                    q = sum_of_squares(load_x, h_row, k) / k
                factor = 1 / rho_of(s, q, k) if k else 0.0
            if is_wide:
                low, high = span(load_x, h_row, mask_row, stride)
                of_factor = (bits(factor) >> 52) - 1023
                low, high = low + of_factor, high + of_factor
                least_dy, most_dy = span(load_y, dy_row, mask_row, stride)
                least_dy += least + min(of_factor, 0) + 2 * min(low, 0)
                most_dy += most + max(of_factor, 0) + 2 * max(high, 0)
                is_wild = low < -_FAR or least_dy < -2 * _FAR or most_dy > 2 * _FAR or abs(of_factor) > 2 * _FAR
            if has_mask:
                k = centre(load_x, h_row, mask_row, stride, s.k, factor, variance, centred)
                if is_wide and is_wild and k:
                    for j in range(n if has_bias else 0):
                        dbias_sums[j] += load_y(dy_row[j]) if is_counted(mask_row, stride, j) else 0.0
                    failed |= call_c(
                        word(table(), settle), settings, h_at, dy_at, dh_at, prepared, mask_at, stride, dx_at, sums
                    )
                    continue
                inner, length = 0.0, 0.0
                for j in range(n if k else 0):
                    if is_counted(mask_row, stride, j):
                        v, normalised = load_y(dy_row[j]), load_x(h_row[j]) * factor
                        dscale_sums[j] += v * normalised
                        inner += v * gain[j] * normalised
                        if has_bias:
                            dbias_sums[j] += load_y(dy_row[j])
                for j in range(n):
                    length = add_product_in_any_order(centred[j], centred[j], length)
                share = slope(s, k, factor, length) * inner / (k if k else 1)
                cancels = False
                for j in range(n if dx else 0):
                    gradient = 0.0
                    if k and is_counted(mask_row, stride, j):
                        near = centred[j] * share if j < s.k else 0.0
                        rest = load_y(dy_row[j]) * gain[j] - near
                        gradient = factor * rest
                        cancels |= abs(rest) < _MAY_CANCEL * abs(near)
                    store(dx_row, j, (gradient + load_x(dh_row[j]) if dh else gradient) + 0.0)
                if not is_wide and dx and (cancels or (is_wild and k)):
                    failed |= call_c(
                        word(table(), settle), settings, h_at, dy_at, dh_at, prepared, mask_at, stride, dx_at, 0
                    )
                continue
            if has_bias:
                for j in range(n):
                    dbias_sums[j] += load_y(dy_row[j])
            if is_wide and is_wild:
                failed |= call_c(word(table(), settle), settings, h_at, dy_at, dh_at, prepared, 0, -1, dx_at, sums)
                continue
            inner, length = 0.0, 0.0
            for j in range(n):
                if is_wide:
                    term = load_y(dy_row[j]) * (load_x(h_row[j]) * factor)
                    dscale_sums[j] += term
                    inner = add_product_in_any_order(term, gain[j], inner)
                else:  # the product is exact
                    product = load_y(dy_row[j]) * load_x(h_row[j])
                    dscale_sums[j] = multiply_add(product, factor, dscale_sums[j])
                    inner = add_product_in_any_order(product, gain[j], inner)
            inner *= 1.0 if is_wide else factor
            if s.position == OUTSIDE:
                length = scaled_sum_of_squares(load_x, h_row, k, factor)
            share = slope(s, k, factor, length) * inner / k
            if not dx:
                continue
            step = factor * share
            cancels, j, sampled = not is_wide and 0 < abs(step) < np.inf, 0, 0
            while cancels and j < k and sampled < _SAMPLE:
                near = load_x(h_row[j]) * step
                cancels = abs(load_y(dy_row[j]) * gain[j] - near) <= _PARALLEL * abs(near)
                sampled += near != 0
                j += 1
            cancels &= sampled > 0
            if may_be_single and single and 2.0**-20 < factor < 2.0**20 and abs(share) < 2.0**20:
                backward_row(h_row, dy_row, gain32, np.float32(factor), np.float32(share), dx_row, doubt)
                for i8 in range(eight if any_set(eights) else 0):
                    if eights[i8]:
                        last = np.uint64(8 * i8 + 8 if 8 * i8 + 8 < n else n)
                        cancels |= fill(h_row, dy_row, dh_row, gain, factor, step, dx_row, np.uint64(8 * i8), last)
            else:
                cancels |= fill(h_row, dy_row, dh_row, gain, factor, step, dx_row, np.uint64(0), np.uint64(k))
                for j in range(np.uint64(k), np.uint64(n)):  # unsigned as in fill
                    gradient = factor * (load_y(dy_row[j]) * gain[j])
                    store(dx_row, j, (gradient + load_x(dh_row[j]) if has_other else gradient) + 0.0)
            if cancels or is_wild:
                failed |= call_c(word(table(), settle), settings, h_at, dy_at, dh_at, prepared, 0, -1, dx_at, 0)
        if has_mask or may_be_single:
            free(memory)
        return failed

    return backward
