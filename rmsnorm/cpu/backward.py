"""The backward pass on rows in memory, compiled: float64 inside, each gradient rounded once.

    dx = (u - h / s <u, h / rho> / k) / rho + dh,    u = (o + scale) dy

with drho / dh = h / (k s). With a gate before the norm this is the gradient of h = x f(z), and dx and dgate are its
products with f(z) and with x f'(z). With a gate after the norm dy is multiplied by f(z), and dgate is the product of
dy, what forward.py multiplies by f(z), and f'(z). The results of such products are rows in float64.

Addresses, rows and what is compiled are as in forward.py; the address h is that of x without a residual. Source: Zhang
& Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from rmsnorm.cpu import gate as gates
from rmsnorm.cpu.bfloat16 import any_set, backward_row, is_moderate, put_of
from rmsnorm.cpu.exact import _exponent
from rmsnorm.cpu.formats import LOAD, ROUND, STORE, add_product_in_any_order, apart, bits, inlined, multiply_add, view
from rmsnorm.cpu.settings import BACKWARD, F64, OUTSIDE, RECORD, STORAGE, cancelled_place
from rmsnorm.cpu.statistic import (
    centre,
    group_of,
    is_counted,
    mean_square_of,
    place,
    rho_of,
    scaled_sum_of_squares,
    slope,
)
from rmsnorm.cpu.system import LINE, aligned, call_c, copy_words, free, malloc, settings_at, table, word

# cancelled.py computes three kinds of rows again. In the first, u is parallel to h: the first elements of the row that
# are not 0 show it. In the second, the terms of an element cancel, so that its last bits could be wrong; random rows
# rarely do that. In the third, x or the gain is float64, and so large or small that a product may leave the range.
_SAMPLE: Final = 16
_PARALLEL: Final = 2.0**-8
_CANCELS: Final = 2.0**-24
_FAR: Final = 400  # of exponents: so far from 0 a product of two such numbers is within the range
_INFINITE: Final = np.int64(0x7FF0000000000000)
_MAY_CANCEL: Final = 2.0**-16  # with a mask, where rows are not tested

(
    _H, _H_STEP, _, _MASK, _MASK_STEP, _MASK_STRIDE, _INVERSE_RMS, _DY, _DH, _DX, _, _DBIAS, _Z, _Z_STEP, _DZ, _,
) = range(len(BACKWARD))  # fmt: skip


def compiled(x: str, y: str, norm: str, product: str, *options: str) -> Any:
    """The kernel for the formats of x and y, with what the options name (see machine_code.py).

    ``norm`` and ``product``, as in forward.py, count with a gate after the norm alone.
    """
    has_mask, has_other = "mask" in options, "other" in options
    own = gates.gate_of(options)
    has_gate, on_x, on_y = own.z != "", own.position == "before", own.position == "after"
    z = own.z or x
    load_x, load_y, load_z = LOAD[x], LOAD[y], LOAD[z]
    # of the rows that are normalised, of their gradients, and of the gradients of what the norm gives
    h_format, v_format = "float64" if on_x else x, "float64" if on_y else y
    load_h, load_v, store = LOAD[h_format], LOAD[v_format], STORE["float64" if has_gate else x]
    put_x, put_z = put_of(x), put_of(z)
    like_h, like_v, like_x, like_y, like_z = (STORAGE[name](0) for name in (h_format, v_format, x, y, z))
    z_bytes = np.dtype(STORAGE[z]).itemsize
    has_dh = has_other and not on_x
    may_be_single = x == y == "bfloat16" and not (has_mask or has_other or has_gate)
    is_wide = "float64" in (x, y)
    settle = cancelled_place(h_format, v_format)
    mean_square = mean_square_of(load_h, has_mask)
    factor_and_slope = gates.factor_and_slope_of(own)
    lift = gates.lift_of(own, x)
    before, with_bias = norm != "", "bias" in options
    round_norm, round_product = ROUND[norm or "float64"], ROUND[product or "float64"]

    def fill(h: Any, dy: Any, dh: Any, gain: Any, factor: float, step: float, dx: Any, first: Any, last: Any) -> Any:
        """Elements ``first`` to ``last`` of a row of dx: unsigned, as numba lets a signed index count from the end.

        Returns whether one of them is a small difference of large terms.
        """
        cancels = False
        for j in range(first, last):
            near = load_h(h[j]) * step
            rest = multiply_add(load_v(dy[j]), gain[j], -near)
            gradient = multiply_add(factor, rest, 0.0)  # a zero becomes +0
            store(dx, j, gradient + load_x(dh[j]) + 0.0 if has_dh else gradient)
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

    def weigh(x: Any, z: Any, dy: Any, f: Any, derivative: Any, product: Any) -> None:
        """f(z), f'(z), and the product of f(z) with x, or with dy."""
        for j in range(f.size):
            f[j], derivative[j] = factor_and_slope(load_z(z[j]))
            product[j] = f[j] * (load_x(x[j]) if on_x else load_y(dy[j]))

    weigh = apart(weigh)

    def ungated(k: int, h: Any, rho: float, gain: Any, b: Any, y: Any) -> None:
        """y before the gate, as forward.py rounds it; 0 in a row with nothing counted."""
        for j in range(y.size if has_mask and k == 0 else 0):
            y[j] = 0.0
        for j in range(0 if has_mask and k == 0 else y.size):
            if before:
                result = round_product(round_norm(load_h(h[j]) / rho) * round_product(gain[j]))
            else:
                result = load_h(h[j]) * gain[j] / rho
            y[j] = round_product(result + b[j]) if with_bias else result

    ungated = apart(ungated)

    def unweigh(rest: Any, factor: Any, derivative: Any, mask: Any, stride: int) -> None:
        """dgate in place of what it has beside x or dy."""
        for j in range(rest.size):
            along = rest[j] * (load_x(factor[j]) if on_x else load_y(factor[j])) * derivative[j]
            rest[j] = along + 0.0 if is_counted(mask, stride, j) else 0.0

    unweigh = apart(unweigh)

    def unweigh_x(gradient: Any, f: Any, dh: Any, adds: bool, mask: Any, stride: int) -> None:
        """dx in place of f(z)."""
        for j in range(f.size):
            along = gradient[j] * f[j] if is_counted(mask, stride, j) else 0.0
            f[j] = (along + load_x(dh[j]) if adds else along) + 0.0

    unweigh_x = apart(unweigh_x)

    def backward(settings: int, start: int, stop: int, prepared: int, sums: int, arguments: int) -> int:
        """Computes rows ``start`` to ``stop`` of dx, and the sums over these rows for dscale and dbias at ``sums``.

        Without 1 / rho this is computed again, which is meant for x of at most 32 bits. Returns 1 if memory is short.
        """
        s = settings_at(settings)
        n, k, variance = s.n, s.k, s.variance
        groups = s.groups
        start, stop, width = start * groups, stop * groups, n * groups
        h, h_step, dy, dh = word(arguments, _H), word(arguments, _H_STEP), word(arguments, _DY), word(arguments, _DH)
        dx, inverse_rms, mask = word(arguments, _DX), word(arguments, _INVERSE_RMS), word(arguments, _MASK)
        mask_step, stride = word(arguments, _MASK_STEP), word(arguments, _MASK_STRIDE) if mask else -1
        z, z_step, dz = word(arguments, _Z), word(arguments, _Z_STEP), word(arguments, _DZ)
        row_bytes, y_bytes = n * s.x_bytes, n * s.y_bytes
        gains, all_sums = view(prepared, width, 0.0), view(sums, 2 * width, 0.0)
        has_bias, has_rms = word(arguments, _DBIAS) != 0, inverse_rms != 0
        for j in range(2 * width if has_bias else width):
            all_sums[j] = 0.0
        if has_mask:
            memory = malloc(8 * n)
            if memory == 0:
                return 1
            centred = view(memory, n, 0.0)
        if may_be_single:
            eight = (n + 7) // 8
            memory = malloc(LINE + 4 * width + LINE + 8 * eight)
            if memory == 0:
                return 1
            gains32 = view(aligned(memory), width, np.float32(0))
            marks = aligned(aligned(memory) + 4 * width)
            eights, doubt = view(marks, eight, np.uint64(0)), view(marks, n, np.uint8(0))
            eights[eight - 1] = 0  # its last elements are none of the row
            for j in range(width):
                gains32[j] = gains[j]
            single = s.single and k == n and is_moderate(gains)
        if has_gate:
            size = (n + 7) // 8
            own_memory = malloc(RECORD + LINE + 8 * (4 * n + size))
            if own_memory == 0:
                return 1
            copy_words(settings, own_memory, RECORD // 8)
            settings = own_memory
            s, eps = settings_at(settings), s.eps
            f_at = aligned(own_memory + RECORD)
            f, derivative = view(f_at, n, 0.0), view(f_at + 8 * n, n, 0.0)
            weighed_at, gradient_at = f_at + 16 * n, f_at + 24 * n
            weighed, gradients = view(weighed_at, n, 0.0), view(gradient_at, n, 0.0)
            eights, doubt = view(f_at + 32 * n, size, np.uint64(0)), view(f_at + 32 * n, n, np.uint8(0))
            eights[size - 1] = 0  # its last elements are none of the row
        failed, least, most = 0, np.int64(0), np.int64(0)
        is_wild: Any = False
        if s.scale == F64:
            for j in range(width):
                of_gain = _exponent(gains[j])
                least = of_gain if of_gain < least else least
                most = of_gain if of_gain > most else most
                if not abs(gains[j]) < np.inf:
                    is_wild = True
            is_wild = is_wild or least < -_FAR or most > _FAR
        for i in range(start, stop):
            h_at, dy_at = h + place(i, groups, h_step, row_bytes), dy + i * y_bytes
            dh_at, dx_at = dh + i * row_bytes if dh else 0, dx + i * row_bytes if dx else 0
            mask_at = mask + place(i, groups, mask_step, n * stride)
            x_row, upstream, mask_row = view(h_at, n, like_x), view(dy_at, n, like_y), view(mask_at, n, np.uint8(0))
            dh_row = view(dh_at, n, like_x)
            first = group_of(i, groups) * n
            gains_at, sums_at = prepared + 8 * first, sums + 8 * first
            gain, b = view(gains_at, n, 0.0), view(gains_at + 8 * width, n, 0.0)
            dscale_sums, dbias_sums = view(sums_at, n, 0.0), view(sums_at + 8 * width, n, 0.0)
            if has_gate:
                z_row = view(z + place(i, groups, z_step, z_bytes * n), n, like_z)
                weigh(x_row, z_row, upstream, f, derivative, weighed)
                s.eps = eps
            if on_x:
                h_at, dh_at, dx_at = weighed_at, 0, gradient_at
            elif on_y:
                dy_at = weighed_at
            h_row, dy_row = view(h_at, n, like_h), view(dy_at, n, like_v)
            if has_gate:
                dx_row = gradients
            else:
                dx_row = view(dx_at, n, like_x)
            rho = 0.0
            if has_rms and not has_gate:
                factor = view(inverse_rms, stop, 0.0)[i]
            else:
                k, q = mean_square(h_row, mask_row, stride, s.k, variance)
                if on_x and q < gates.LEAST and eps < gates.SMALL:
                    power = lift(s, x_row, z_row, mask_row, stride, f, derivative)
                    for j in range(n):
                        weighed[j] = load_x(x_row[j]) * f[j]
                    s.eps = gates.scaled_eps(s, power)
                    k, q = mean_square(h_row, mask_row, stride, s.k, variance)
                rho = rho_of(s, q, k)
                factor = 1 / rho if k else 0.0
            if is_wide:
                low, high = span(load_h, h_row, mask_row, stride)
                of_factor = (bits(factor) >> 52) - 1023
                low, high = low + of_factor, high + of_factor
                least_dy, most_dy = span(load_v, dy_row, mask_row, stride)
                least_dy += least + min(of_factor, 0) + 2 * min(low, 0)
                most_dy += most + max(of_factor, 0) + 2 * max(high, 0)
                is_wild = low < -_FAR or least_dy < -2 * _FAR or most_dy > 2 * _FAR or abs(of_factor) > 2 * _FAR
            if has_mask:
                k = centre(load_h, h_row, mask_row, stride, s.k, factor, variance, centred)
            if has_bias:
                for j in range(n if k else 0):
                    if not has_mask or is_counted(mask_row, stride, j):
                        dbias_sums[j] += load_v(dy_row[j])
            if is_wide and is_wild and k:
                failed |= call_c(
                    word(table(), settle), settings, h_at, dy_at, dh_at, gains_at, mask_at if mask else 0, stride,
                    dx_at, sums_at,
                )  # fmt: skip
                continue
            inner, length, cancels = 0.0, 0.0, False
            if has_mask:
                for j in range(n if k else 0):
                    if is_counted(mask_row, stride, j):
                        v, normalised = load_v(dy_row[j]), load_h(h_row[j]) * factor
                        dscale_sums[j] += v * normalised
                        inner += v * gain[j] * normalised
                for j in range(n):
                    length = add_product_in_any_order(centred[j], centred[j], length)
                share = slope(s, k, factor, length) * inner / (k if k else 1)
                for j in range(n if dx_at else 0):
                    gradient = 0.0
                    if k and is_counted(mask_row, stride, j):
                        near = centred[j] * share if j < s.k else 0.0
                        rest = load_v(dy_row[j]) * gain[j] - near
                        gradient = factor * rest
                        cancels |= abs(rest) < _MAY_CANCEL * abs(near)
                    store(dx_row, j, (gradient + load_x(dh_row[j]) if dh_at else gradient) + 0.0)
                cancels = not is_wide and (cancels or (is_wild and k > 0))
            else:
                for j in range(n):
                    if is_wide:
                        term = load_v(dy_row[j]) * (load_h(h_row[j]) * factor)
                        dscale_sums[j] += term
                        inner = add_product_in_any_order(term, gain[j], inner)
                    else:  # the product is exact, but with a gate
                        product = load_v(dy_row[j]) * load_h(h_row[j])
                        dscale_sums[j] = multiply_add(product, factor, dscale_sums[j])
                        inner = add_product_in_any_order(product, gain[j], inner)
                inner *= 1.0 if is_wide else factor
                if s.position == OUTSIDE:
                    length = scaled_sum_of_squares(load_h, h_row, k, factor)
                share = slope(s, k, factor, length) * inner / k
                step = factor * share
                if dx_at:
                    sampled, j = 0, 0
                    cancels = not is_wide and 0 < abs(step) < np.inf
                    while cancels and j < k and sampled < _SAMPLE:
                        near = load_h(h_row[j]) * step
                        cancels = abs(load_v(dy_row[j]) * gain[j] - near) <= _PARALLEL * abs(near)
                        sampled += near != 0
                        j += 1
                    cancels &= sampled > 0
                    if may_be_single and single and 2.0**-20 < factor < 2.0**20 and abs(share) < 2.0**20:
                        gain32 = view(aligned(memory) + 4 * first, n, np.float32(0))
                        backward_row(h_row, dy_row, gain32, np.float32(factor), np.float32(share), dx_row, doubt)
                        for i8 in range(eight if any_set(eights) else 0):
                            if eights[i8]:
                                last = np.uint64(8 * i8 + 8 if 8 * i8 + 8 < n else n)
                                here = np.uint64(8 * i8)
                                cancels |= fill(h_row, dy_row, dh_row, gain, factor, step, dx_row, here, last)
                    else:
                        cancels |= fill(h_row, dy_row, dh_row, gain, factor, step, dx_row, np.uint64(0), np.uint64(k))
                        for j in range(np.uint64(k), np.uint64(n)):  # unsigned as in fill
                            gradient = factor * (load_v(dy_row[j]) * gain[j])
                            store(dx_row, j, (gradient + load_x(dh_row[j]) if has_dh else gradient) + 0.0)
                    cancels = not is_wide and (cancels or is_wild)
            if on_y and dx:
                put_x(gradients, view(dx_at, n, like_x), eights, doubt)
            if cancels and dx_at:
                failed |= call_c(
                    word(table(), settle), settings, h_at, dy_at, dh_at, gains_at, mask_at if mask else 0, stride,
                    dx_at, 0,
                )  # fmt: skip
            if on_x and dx:
                unweigh_x(gradients, f, view(dh + i * row_bytes, n, like_x), dh != 0, mask_row, stride)
                put_x(f, view(dx + i * row_bytes, n, like_x), eights, doubt)
            if has_gate and dz:
                if on_x:
                    unweigh(gradients, x_row, derivative, mask_row, stride)
                else:
                    ungated(k, h_row, rho, gain, b, gradients)
                    unweigh(gradients, upstream, derivative, mask_row, stride)
                put_z(gradients, view(dz + i * z_bytes * n, n, like_z), eights, doubt)
        if has_mask or may_be_single:
            free(memory)
        if has_gate:
            free(own_memory)
        return failed

    return backward
