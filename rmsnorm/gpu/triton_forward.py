"""The forward pass in Triton.

    y = h / rho * (o + scale) + bias,    h = x + residual

A kernel goes one of three ways, which WAY names:

    cut      x, gain and y of one format of 16 bits: a quotient is cut off, and its last bit set (``triton_quotient``)
    wide     x of 32 bits: h gain is exact in float64, its product with 1 / rho errs by 2^-52, and is rounded to
             float32: one element in about 2^27 may be rounded to the wrong side
    pairs    all else: pairs of float32, rounded once wherever the variant rounds

Unless FLOAT64, the sum and 1 / rho of x of 16 bits are pairs of float32, too: for cards on which float64 is slow.

A row that a way cannot compute is computed again in float64, 256 elements at a time: the sum without the test of the
gain, then the quotient h gain / rho, if rho is short, which makes exact ties exact; else the product with 1 / rho,
rounded to odd. Padding, rows of zeros with an eps, is an ordinary row. Source: Zhang & Sennrich 2019 (arXiv
1910.07467).
"""

from typing import Final

import triton
import triton.language as tl

from rmsnorm.gpu.triton_pairs import (
    LEAST_RESULT,
    LEAST_RHO,
    MOST,
    MOST_RHO,
    STEP,
    gains,
    group_of_program,
    inverse_rho,
    inverse_rho_in_pairs,
    is_outside,
    over_rho,
    rho_of,
    rounded,
    rounded_near,
    rounded_wide,
    single,
    split,
    split_argument,
    sum_of_pairs,
    sum_of_parts,
    to_format,
    two_sum,
    wide_gains,
)
from rmsnorm.gpu.triton_quotient import MOST_GAIN, by_cutting, by_cutting_wide, guarded

LEAST_WIDE: Final = tl.constexpr(2.0**-500)  # of 1 / rho in float64
MOST_WIDE: Final = tl.constexpr(2.0**500)


@triton.jit
def _in_float64(
    h, scale, bias, columns, inside, inverse, rho, is_short, OFFSET: tl.constexpr, NORM: tl.constexpr,
    PRODUCT: tl.constexpr, RESULT: tl.constexpr,
):  # fmt: skip
    """The result of h in float64, rounded wherever the variant rounds; without rho no tie is told from what is near."""
    w = single(h).to(tl.float64)
    if NORM != "":
        w = single(rounded_wide(over_rho(w, inverse, rho, is_short), NORM)).to(tl.float64)
        if scale is not None:
            gain = single(rounded_wide(wide_gains(scale, columns, inside, OFFSET), PRODUCT)).to(tl.float64)
            w = single(rounded_wide(w * gain, PRODUCT)).to(tl.float64)
    else:
        if scale is not None:
            w = w * wide_gains(scale, columns, inside, OFFSET)
        w = over_rho(w, inverse, rho, is_short)
    if bias is not None:
        w += single(tl.load(bias + columns, mask=inside, other=0.0)).to(tl.float64)
        if NORM != "":
            w = single(rounded_wide(w, PRODUCT)).to(tl.float64)
    return rounded_wide(w, RESULT)


@triton.jit
def _is_extreme(t, h, gain):
    """Whether the result t of h and a gain may be inexact, or is not finite."""
    size = tl.abs(t)
    return ((size <= MOST) == 0) | ((size < LEAST_RESULT) & (h != 0) & (gain != 0))


@triton.jit
def _in_pairs(
    h, scale, bias, columns, inside, high, low, OFFSET: tl.constexpr, NORM: tl.constexpr, PRODUCT: tl.constexpr,
    RESULT: tl.constexpr,
):  # fmt: skip
    """The result of h, a float32, in pairs of float32; and where it may be inexact or is not finite."""
    if NORM != "":
        t = h * high
        bad = _is_extreme(t, h, 1.0)
        v = single(rounded_near(t, tl.fma(h, -low, tl.fma(h, -high, t)), NORM))
        if scale is not None:
            gain, gain_error = gains(scale, columns, inside, OFFSET)
            if OFFSET != 0:
                gain = rounded(gain, gain_error, PRODUCT)
            v = single(to_format(v * single(to_format(gain, PRODUCT)), PRODUCT))  # float32 has the product, or it is
        if bias is not None:
            total, error = two_sum(v, single(tl.load(bias + columns, mask=inside, other=0.0)))
            bad = bad | is_outside(total, 0.0, 0.0)
            v = single(rounded_near(total, 0.0 - error, PRODUCT))
        return to_format(v, RESULT), bad
    else:
        product, gain = h, 1.0
        if scale is not None:
            gain, gain_error = gains(scale, columns, inside, OFFSET)
            product = h * gain
        t = product * high
        bad = _is_extreme(t, h, gain)
        excess = tl.fma(product, -low, tl.fma(product, -high, t))
        if scale is not None:
            product_error = tl.fma(h, gain, -product)
            if OFFSET != 0:
                product_error = tl.fma(h, gain_error, product_error)
            excess = tl.fma(product_error, -high, excess)
        if bias is not None:
            t, sum_error = two_sum(t, single(tl.load(bias + columns, mask=inside, other=0.0)))
            bad = bad | is_outside(t, 0.0, 0.0)
            return rounded(t, sum_error - excess, RESULT), bad
        else:
            return rounded_near(t, excess, RESULT), bad


@triton.jit
def load_sum(x, residual, offsets, residual_offsets, inside, FORMAT: tl.constexpr):
    """h, which is x or x + residual rounded once, in the format of x."""
    h = tl.load(x + offsets, mask=inside, other=0.0)
    if residual is not None:
        other = tl.load(residual + residual_offsets, mask=inside, other=0.0)
        total, error = two_sum(single(h), single(other))
        exact = tl.abs(error) < float("inf")  # not of an infinite sum
        h = rounded(total, tl.where(exact, error, 0.0), FORMAT)
    return h


@triton.jit
def sum_parts(
    x, residual, parts, n, groups, x_step, CHUNKS,
    FORMAT: tl.constexpr, BLOCK: tl.constexpr, FLOAT64: tl.constexpr,
):  # fmt: skip
    """Into ``parts``, of rows by CHUNKS: the squares in a chunk of a row."""
    index, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, group, _ = group_of_program(groups)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    here = row.to(tl.int64) * x_step + group * n + columns
    h = load_sum(x, residual, here, index * n + columns, columns < n, FORMAT)
    if FLOAT64:
        h = single(h).to(tl.float64)
        total = tl.sum(h * h, 0)
    else:
        near, error = sum_of_pairs(single(h) * single(h), None, 0)
        total = near.to(tl.float64) + error.to(tl.float64)
    tl.store(parts + index * CHUNKS + chunk, total)


@triton.jit
def forward(
    x, residual, scale, bias, parts, y, h_out, inverse_rms, rows, n, groups, x_step, CHUNKS, eps: tl.float64, share:
    tl.float64, POSITION: tl.constexpr, OFFSET: tl.constexpr, FORMAT: tl.constexpr,
    NORM: tl.constexpr, PRODUCT: tl.constexpr, RESULT: tl.constexpr, WAY: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, FLOAT64: tl.constexpr, EIGHTS: tl.constexpr,
):  # fmt: skip
    """A tile of y, h and 1 / rho, of rows of one group: program i has tile i // groups of group i % groups.

    ``parts``: what sum_parts has written, if rows are split; a program then has a chunk of one row. NORM, PRODUCT:
    the formats to which h / rho and the products with the parameters are rounded; NORM is empty if only y is. EIGHTS: 8
    divides n and x_step, which Triton sees for 16 alone.
    """
    if EIGHTS:
        n, x_step = n // 8 * 8, x_step // 8 * 8  # tl.multiple_of does not mark an argument
    tile, group, count = group_of_program(groups)
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    index = row * count + group
    x_row, own_row = row * x_step + group * n, index * n
    if scale is not None:
        scale += group * n
    if bias is not None:
        bias += group * n
    chunk = tl.program_id(1)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (columns < n)
    h = load_sum(x, residual, x_row + columns, own_row + columns, inside, FORMAT)
    if residual is not None:
        tl.store(h_out + own_row + columns, h, mask=inside)
    if WAY == "cut":
        gain = tl.full(h.shape, 1.0, h.dtype)
        if scale is not None:
            gain = tl.load(scale + columns, mask=columns < n, other=0.0)
    if parts is None:
        if WAY == "cut":
            v = single(h)
            if scale is not None:
                if gain.dtype == tl.float32:
                    v = tl.where(tl.abs(gain) < MOST_GAIN, v, float("nan"))
                else:
                    v = guarded(h, gain, FORMAT)
            square = v * v  # exact, or too small to count
        else:
            v = single(h)
            square = v.to(tl.float64) * v.to(tl.float64) if FLOAT64 else v * v
        if FLOAT64:
            total = tl.sum(square.to(tl.float64), 1)[:, None]
        else:
            near, error = sum_of_pairs(square, None, 1)
            near, error = near[:, None], error[:, None]
    else:
        total = sum_of_parts(parts, index, CHUNKS, BLOCK)
        near, error = split(total)
    alive, size = row < rows, tl.zeros((ROWS, 1), tl.float64) + n
    if FLOAT64:
        inverse, is_short = inverse_rho(total, share, size, eps, POSITION)
    else:
        part, part_error = split_argument(share)
        high, low, is_short = inverse_rho_in_pairs(near, error, part, part_error, eps, size, POSITION)
        inverse = (high.to(tl.float64) + low.to(tl.float64)).to(tl.int64, bitcast=True) | 1
        inverse = inverse.to(tl.float64, bitcast=True)
        special = is_short | (((high >= 1 / MOST_RHO) & (high <= 1 / LEAST_RHO)) == 0)
    if WAY == "wide":
        special = is_short | (((inverse >= LEAST_WIDE) & (inverse <= MOST_WIDE)) == 0)
    elif FLOAT64:
        special = is_short | (((inverse >= 1 / MOST_RHO) & (inverse <= 1 / LEAST_RHO)) == 0)
    if inverse_rms is not None and chunk == 0:
        tl.store(inverse_rms + index, inverse, mask=row < rows)

    if WAY == "cut":
        if scale is not None and (OFFSET != 0 or gain.dtype == tl.float32):
            result = by_cutting_wide(h, gain, inverse, OFFSET, FORMAT)
        else:
            pair = (inverse, None) if FLOAT64 else (high, low)
            result = by_cutting(h, gain, pair[0], FORMAT, NORM != "", pair[1])
    elif WAY == "wide":
        result = _in_float64(h, scale, bias, columns, columns < n, inverse, None, None, OFFSET, NORM, PRODUCT, RESULT)
    else:
        if FLOAT64:
            high, low = split(inverse)
        result, bad = _in_pairs(single(h), scale, bias, columns, columns < n, high, low, OFFSET, NORM, PRODUCT, RESULT)
        special = special | bad
    special = special & alive
    tl.store(y + own_row + columns, result, mask=inside)
    if tl.max(special.to(tl.int32)) > 0:
        tl.debug_barrier()
        if parts is None or not FLOAT64:
            squares = tl.zeros((ROWS, STEP // ROWS), tl.float64)
            for start in range(0, n, STEP // ROWS):
                j = start + tl.arange(0, STEP // ROWS)[None, :]
                within = (row < rows) & (j < n)
                w = single(load_sum(x, residual, x_row + j, own_row + j, within, FORMAT)).to(tl.float64)
                squares += w * w
            total = tl.sum(squares, 1)[:, None]
            inverse, is_short = inverse_rho(total, 1 / size, size, eps, POSITION)
        rho = rho_of(total / size, size, eps, POSITION)
        is_known = (inverse >= LEAST_WIDE) & (inverse <= MOST_WIDE)
        is_short = is_short | (is_known == 0)
        if inverse_rms is not None and chunk == 0:
            inverse_all = tl.where(alive, tl.where(is_known, inverse, 1 / rho), 0.0)
            tl.store(inverse_rms + index, inverse_all, mask=row < rows)
        for start in range(chunk * BLOCK, tl.minimum(n, (chunk + 1) * BLOCK), STEP // ROWS):
            j = start + tl.arange(0, STEP // ROWS)[None, :]
            within = (row < rows) & (j < n)
            own = load_sum(x, residual, x_row + j, own_row + j, within, FORMAT)
            repaired = _in_float64(own, scale, bias, j, j < n, inverse, rho, is_short, OFFSET, NORM, PRODUCT, RESULT)
            tl.store(y + own_row + j, repaired, mask=within)
