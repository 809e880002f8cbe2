"""The forward pass on rows in memory, compiled: float64 inside, rounded once wherever the variant rounds.

    y = h / rho * (o + scale) + bias,    h = x + residual
    with a gate:    h = (x + residual) f(z), or the right side of y times f(z)

A row of the parameters may hold several groups, each of which is normalised by itself: ``n`` is the elements of one.
An address is an integer, and 0 if there is no such array. Rows of residual, y and h follow each other without a gap.
Code that a call does not use is not compiled: numba leaves it out after an ``if`` on a variable of ``compiled``.
Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from rmsnorm.cpu import exact, target
from rmsnorm.cpu import gate as gates
from rmsnorm.cpu.bfloat16 import any_set, forward_row_of, is_moderate, is_small
from rmsnorm.cpu.formats import LOAD, ROUND, STORE, apart, fma, inlined, view
from rmsnorm.cpu.settings import F64, FORWARD, RECORD, STORAGE, may_use_float32
from rmsnorm.cpu.statistic import add_rows, group_of, mean_square_of, place, rho_of
from rmsnorm.cpu.system import LINE, aligned, copy_words, free, malloc, settings_at, word

_FMA: Final = target.has_fma()
_X, _X_STEP, _RESIDUAL, _, _BIAS, _MASK, _MASK_STEP, _MASK_STRIDE, _Y, _H, _INVERSE_RMS, _Z, _Z_STEP = range(
    len(FORWARD)
)


def compiled(x: str, y: str, norm: str, product: str, *options: str) -> Any:
    """The kernel for the formats of x and y, with what the options name (see machine_code.py).

    ``norm`` and ``product`` are the formats to which h / rho and the products with the gain are rounded; both are empty
    if only y is rounded. Where x or y is float64 the kernel has error terms.
    """
    has_mask, has_bias = "mask" in options, "bias" in options
    has_other = has_mask or "other" in options
    if "float64" in (x, y):
        return exact.compiled(x, y, norm, product, has_mask, has_other, has_bias)
    own = gates.gate_of(options)
    has_gate, on_x, on_y = own.z != "", own.position == "before", own.position == "after"
    z = own.z or x
    load_x, load_z, store, add = LOAD[x], LOAD[z], STORE[y], STORE[x]
    load = LOAD["float64"] if on_x else load_x  # of a row that is normalised
    like_x, like_y, like_z, z_bytes = STORAGE[x](0), STORAGE[y](0), STORAGE[z](0), np.dtype(STORAGE[z]).itemsize
    factor, lift = gates.factor_of(own), gates.lift_of(own, x)
    before = norm != ""
    round_norm, round_product = ROUND[norm or "float64"], ROUND[product or "float64"]
    in_single = before and norm == product == "float32" and not has_bias
    may_be_single = not has_bias and may_use_float32(x, y, norm) and not (has_gate and y != "bfloat16")
    mean_square = mean_square_of(load, has_mask)
    forward_row, read = forward_row_of(own, x, y, product, before)

    def fill_with(quotient: Any) -> Any:
        def fill(
            h: Any, gain: Any, b: Any, rho: float, inverse: float, rest: float, z: Any, y: Any, first: Any, last: Any
        ) -> None:
            """Elements ``first`` to ``last`` of y: unsigned, as numba lets a signed index count from the end."""
            for j in range(first, last):
                if before:
                    result = round_norm(quotient(load(h[j]), rho, inverse, rest))
                    if in_single:
                        result = np.float64(np.float32(result) * np.float32(gain[j]))
                    else:
                        result = round_product(result * gain[j])
                else:  # the product comes first: it is exact up to 32 bits
                    result = quotient(load(h[j]) * gain[j], rho, inverse, rest)
                if has_bias:
                    result = round_product(result + b[j])
                if on_y:
                    result = result * factor(load_z(z[j]))
                store(y, j, result)

        return apart(fill)

    # of few elements, or of very many; a loop with a gate is so long that the compiler would take both ways in it
    fill = fill_with(_by_division if may_be_single or has_gate else _by_either)
    fill_fast = fill_with(_by_reciprocal) if has_gate else fill

    def weigh(x: Any, z: Any, h: Any) -> None:
        for j in range(h.size):
            h[j] = load_x(x[j]) * factor(load_z(z[j]))

    weigh = apart(weigh)

    def forward(settings: int, start: int, stop: int, prepared: int, _: int, arguments: int) -> int:
        """Computes rows ``start`` to ``stop`` of y, h and 1 / rho; without y, only the others. 1 if memory is short.

        ``prepared`` is the address of the gains and, behind them, the biases, in float64.
        """
        s = settings_at(settings)
        n, k, prefetch, variance = s.n, s.k, s.prefetch, s.variance
        groups = s.groups
        start, stop, width = start * groups, stop * groups, n * groups
        x, x_step, y = word(arguments, _X), word(arguments, _X_STEP), word(arguments, _Y)
        residual, h, inverse_rms = word(arguments, _RESIDUAL), word(arguments, _H), word(arguments, _INVERSE_RMS)
        mask, mask_step = word(arguments, _MASK), word(arguments, _MASK_STEP)
        stride = word(arguments, _MASK_STRIDE) if mask else -1
        z, z_step = word(arguments, _Z), word(arguments, _Z_STEP)
        row_bytes, y_bytes = n * s.x_bytes, n * s.y_bytes
        exact_by_reciprocal = _FMA and s.scale != F64
        if may_be_single:
            eight = (n + 7) // 8
            memory = malloc(LINE + 4 * width + LINE + 8 * eight)
            if memory == 0:
                return 1
            gains, gains32 = view(prepared, width, 0.0), view(aligned(memory), width, np.float32(0))
            marks = aligned(aligned(memory) + 4 * width)
            eights, doubt = view(marks, eight, np.uint64(0)), view(marks, n, np.uint8(0))
            eights[eight - 1] = 0  # its last elements are none of the row
            for j in range(width):
                gains32[j] = gains[j]
            single = s.single and y != 0 and is_moderate(gains)
        if on_x:
            own_memory = malloc(RECORD + LINE + 8 * n)
            if own_memory == 0:
                return 1
            copy_words(settings, own_memory, RECORD // 8)
            s, eps = settings_at(own_memory), s.eps
            weighed = view(aligned(own_memory + RECORD), n, 0.0)
        next_k, next_rho = k, 0.0
        for i in range(start - prefetch, stop):
            k, rho = next_k, next_rho
            next_i = i + prefetch
            if next_i < stop:
                h_row = view(x + place(next_i, groups, x_step, row_bytes), n, like_x)
                if has_other and residual:
                    x_row, h_row = h_row, view(h + next_i * row_bytes, n, like_x)
                    add_rows(load_x, add, x_row, view(residual + next_i * row_bytes, n, like_x), h_row)
                mask_row = view(mask + place(next_i, groups, mask_step, n * stride), n, np.uint8(0))
                power = 1.0
                if on_x:
                    z_row = view(z + place(next_i, groups, z_step, z_bytes * n), n, like_z)
                    weigh(h_row, z_row, weighed)
                    next_k, q = mean_square(weighed, mask_row, stride, s.k, variance)
                    if q < gates.LEAST and eps < gates.SMALL:
                        power = lift(s, h_row, z_row, mask_row, stride, weighed, weighed)
                        for j in range(n):
                            weighed[j] *= load_x(h_row[j])
                        s.eps = gates.scaled_eps(s, power)
                        next_k, q = mean_square(weighed, mask_row, stride, s.k, variance)
                    next_rho = rho_of(s, q, next_k)
                    s.eps = eps
                else:
                    next_k, q = mean_square(h_row, mask_row, stride, s.k, variance)
                    next_rho = rho_of(s, q, next_k)
                if inverse_rms:
                    view(inverse_rms, stop, 0.0)[next_i] = 1 / next_rho * power if next_k else 0.0
            if not prefetch:
                k, rho = next_k, next_rho
            if i < start or not y:
                continue
            if on_x:
                row = weighed
            else:
                here = h + i * row_bytes if has_other and residual else x + place(i, groups, x_step, row_bytes)
                row = view(here, n, like_x)
            y_row = view(y + i * y_bytes, n, like_y)
            z_row = view(z + place(i, groups, z_step, z_bytes * n), n, like_z)
            first = group_of(i, groups) * n
            gain, b = view(prepared + 8 * first, n, 0.0), view(prepared + 8 * (width + first), n, 0.0)
            if has_mask and k == 0:
                for j in range(n):
                    store(y_row, j, 0.0)
                continue
            inverse, rest = 0.0, 0.0
            if exact_by_reciprocal and 1e-150 < rho < 1e150:  # so that nothing finite overflows
                inverse = 1 / rho * (1 - 2.0**-52)
                rest = fma(-inverse, rho, 1.0) * inverse
            if (
                may_be_single
                and single
                and 2.0**-20 < rho < 2.0**20
                and ((k == n and not variance) or (not on_x and is_small(read, row, 0 if has_mask else k)))
            ):
                gain32 = view(aligned(memory) + 4 * first, n, np.float32(0))
                forward_row(row, z_row, gain32, np.float32(1 / rho), y_row, doubt)
                for i8 in range(eight if any_set(eights) else 0):
                    if eights[i8]:
                        last = 8 * i8 + 8 if 8 * i8 + 8 < n else n
                        fill(row, gain, b, rho, 0.0, 0.0, z_row, y_row, np.uint64(8 * i8), np.uint64(last))
                continue
            if has_gate and inverse != 0:
                fill_fast(row, gain, b, rho, inverse, rest, z_row, y_row, np.uint64(0), np.uint64(n))
            else:
                fill(row, gain, b, rho, inverse, rest, z_row, y_row, np.uint64(0), np.uint64(n))
        if may_be_single:
            free(memory)
        if on_x:
            free(own_memory)
        return 0

    return forward


@inlined
def _by_division(number: float, rho: float, _: float, __: float) -> Any:
    return number / rho


@inlined
def _by_reciprocal(number: float, rho: float, inverse: float, rest: float) -> Any:
    """number / rho, by 1 / rho = inverse + rest: as exact as a division, and much faster.

    ``rest`` is above 0: so it leaves a zero its sign and an infinite number as it is.
    """
    return fma(number, inverse, number * rest)


@inlined
def _by_either(number: float, rho: float, inverse: float, rest: float) -> Any:
    return number / rho if inverse == 0 else fma(number, inverse, number * rest)
