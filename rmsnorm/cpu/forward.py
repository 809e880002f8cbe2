"""The forward pass on rows in memory, compiled: float64 inside, rounded once wherever the variant rounds.

    y = h / rho * (o + scale) + bias,    h = x + residual

An address is an integer, and 0 if there is no such array. Rows of residual, y and h follow each other without a gap.
What a call does not use is not compiled: numba leaves out what follows an ``if`` on a variable of ``compiled``.
Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from rmsnorm.cpu import exact, target
from rmsnorm.cpu.bfloat16 import any_set, as_it_is, forward_row, forward_row_before, is_moderate, is_small, narrow
from rmsnorm.cpu.formats import LOAD, ROUND, STORE, apart, fma, inlined, view
from rmsnorm.cpu.settings import F64, FORWARD, STORAGE
from rmsnorm.cpu.statistic import add_rows, masked_mean_square, rho_of, sum_of_squares
from rmsnorm.cpu.system import LINE, aligned, free, malloc, settings_at, word

_FMA: Final = target.has_fma()
_X, _X_STEP, _RESIDUAL, _, _BIAS, _MASK, _MASK_STEP, _MASK_STRIDE, _Y, _H, _INVERSE_RMS = range(len(FORWARD))


def compiled(x: str, y: str, norm: str, product: str, *options: str) -> Any:
    """The kernel for the formats of x and y, with what the options name (see machine_code.py).

    ``norm`` and ``product`` are the formats to which h / rho and the products with the gain are rounded; both are empty
    if only y is rounded. Where x or y is float64 the kernel has error terms.
    """
    has_mask, has_bias = "mask" in options, "bias" in options
    has_other = has_mask or "other" in options
    if "float64" in (x, y):
        return exact.compiled(x, y, norm, product, has_mask, has_other, has_bias)
    load, store, add = LOAD[x], STORE[y], STORE[x]
    like_x, like_y = STORAGE[x](0), STORAGE[y](0)
    before = norm != ""
    round_norm, round_product = ROUND[norm or "float64"], ROUND[product or "float64"]
    in_single = before and norm == product == "float32"
    may_be_single = x == "bfloat16" == (norm or y) and y in ("bfloat16", product) and not has_bias
    quotient = _by_division if may_be_single else _by_reciprocal  # of few elements, or of very many
    narrow_y = narrow if y == "bfloat16" else as_it_is

    def fill(h: Any, gain: Any, b: Any, rho: float, inverse: float, rest: float, y: Any, first: Any, last: Any) -> None:
        """Elements ``first`` to ``last`` of a row of y: unsigned, as numba lets a signed index count from the end."""
        for j in range(first, last):
            if before:
                result = round_norm(quotient(load(h[j]), rho, inverse, rest))
                if in_single and not has_bias:
                    store(y, j, np.float64(np.float32(result) * np.float32(gain[j])))
                    continue
                result = round_product(result * gain[j])
            else:  # the product comes first: it is exact up to 32 bits
                result = quotient(load(h[j]) * gain[j], rho, inverse, rest)
            if has_bias:
                result = round_product(result + b[j])
            store(y, j, result)

    fill = apart(fill)

    def forward(settings: int, start: int, stop: int, prepared: int, _: int, arguments: int) -> int:
        """Computes rows ``start`` to ``stop`` of y, h and 1 / rho; without y, only the others. 1 if memory is short.

        ``prepared`` is the address of the gains and, behind them, the biases, in float64.
        """
        s = settings_at(settings)
        n, k, prefetch, variance = s.n, s.k, s.prefetch, s.variance
        x, x_step, y = word(arguments, _X), word(arguments, _X_STEP), word(arguments, _Y)
        residual, h, inverse_rms = word(arguments, _RESIDUAL), word(arguments, _H), word(arguments, _INVERSE_RMS)
        mask, mask_step = word(arguments, _MASK), word(arguments, _MASK_STEP)
        stride = word(arguments, _MASK_STRIDE) if mask else -1
        row_bytes, y_bytes = n * s.x_bytes, n * s.y_bytes
        gain, b = view(prepared, n, 0.0), view(prepared + 8 * n, n, 0.0)
        exact_by_reciprocal = _FMA and s.scale != F64
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
            single = s.single and y != 0 and is_moderate(gain)
        next_k, next_rho = k, 0.0
        for i in range(start - prefetch, stop):
            k, rho = next_k, next_rho
            next_i = i + prefetch
            if next_i < stop:
                h_row = view(x + next_i * x_step, n, like_x)
                if has_other and residual:
                    x_row, h_row = h_row, view(h + next_i * row_bytes, n, like_x)
                    add_rows(load, add, x_row, view(residual + next_i * row_bytes, n, like_x), h_row)
                if has_mask:
                    mask_row = view(mask + next_i * mask_step, n, np.uint8(0))
                    next_k, q = masked_mean_square(load, h_row, mask_row, stride, s.k, variance)
                else:
                    q = sum_of_squares(load, h_row, next_k) / next_k
                next_rho = rho_of(s, q, next_k)
                if inverse_rms:
                    view(inverse_rms, stop, 0.0)[next_i] = 1 / next_rho if next_k else 0.0
            if not prefetch:
                k, rho = next_k, next_rho
            if i < start or not y:
                continue
            h_row = view(h + i * row_bytes if has_other and residual else x + i * x_step, n, like_x)
            y_row = view(y + i * y_bytes, n, like_y)
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
                and ((k == n and not variance) or is_small(h_row, 0 if has_mask else k))
            ):
                if before:
                    forward_row_before(narrow_y, h_row, gain32, np.float32(1 / rho), y_row, doubt)
                else:
                    forward_row(h_row, gain32, np.float32(1 / rho), y_row, doubt)
                for i8 in range(eight if any_set(eights) else 0):
                    if eights[i8]:
                        last = 8 * i8 + 8 if 8 * i8 + 8 < n else n
                        fill(h_row, gain, b, rho, 0.0, 0.0, y_row, np.uint64(8 * i8), np.uint64(last))
                continue
            fill(h_row, gain, b, rho, inverse, rest, y_row, np.uint64(0), np.uint64(n))
        if may_be_single:
            free(memory)
        return 0

    return forward


@inlined
def _by_division(number: float, rho: float, _: float, __: float) -> Any:
    return number / rho


@inlined
def _by_reciprocal(number: float, rho: float, inverse: float, rest: float) -> Any:
    """number / rho, by 1 / rho = inverse + rest unless inverse is 0: as exact as a division, and much faster.

    ``rest`` is above 0: so it leaves a zero its sign and an infinite number as it is.
    """
    return number / rho if inverse == 0 else fma(number, inverse, number * rest)
