"""The forward pass in Triton.

    y = h / rho * (o + scale) + bias,    h = x + residual

The statistic is float64, a product and an addition an element. All else is pairs of float32, rounded once wherever the
variant rounds; a tile in which some number is out of their range is computed again in float64, in steps.
Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

import triton
import triton.language as tl

from rmsnorm.gpu.triton_pairs import (
    LEAST,
    LEAST_RESULT,
    LEAST_RHO,
    MOST,
    MOST_RHO,
    STEP,
    gains,
    group_of_program,
    is_counted,
    is_in_statistic,
    is_outside,
    rho_of,
    rounded,
    rounded_near,
    rounded_wide,
    single,
    split,
    sum_of_parts,
    to_format,
    two_sum,
    wide_gains,
)


@triton.jit
def _is_extreme(t, h, gain):
    """Whether the result t of h and a gain may be inexact, or is not finite."""
    size = tl.abs(t)
    return ((size <= MOST) == 0) | ((size < LEAST_RESULT) & (h != 0) & (gain != 0))


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
    x, residual, mask, parts, n, k, groups, x_step, mask_step, mask_stride, CHUNKS,
    FORMAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Into ``parts``, of rows by CHUNKS: the squares in a chunk of a row; behind them, with a mask, how many count."""
    index, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, group, _ = group_of_program(groups)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    counts = is_counted(mask, index, columns, mask_step, mask_stride, is_in_statistic(columns, k, columns < n))
    here = row.to(tl.int64) * x_step + group * n + columns
    h = load_sum(x, residual, here, index * n + columns, counts, FORMAT)
    h = single(h).to(tl.float64)
    tl.store(parts + index * CHUNKS + chunk, tl.sum(h * h, 0))
    if mask is not None:
        size = tl.sum(counts.to(tl.int32), 0).to(tl.float64)
        tl.store(parts + (tl.num_programs(0) + index) * CHUNKS + chunk, size)


@triton.jit
def forward(
    x, residual, scale, bias, mask, parts, y, h_out, inverse_rms, rows, n, k, groups, x_step, mask_step, mask_stride,
    CHUNKS, eps: tl.float64, POSITION: tl.constexpr, OFFSET: tl.constexpr, FORMAT: tl.constexpr, NORM: tl.constexpr,
    PRODUCT: tl.constexpr, RESULT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """A tile of y, h and 1 / rho, of rows of one group: program i has tile i // groups of group i % groups.

    ``parts``: what sum_parts has written, if rows are split; a program then has a chunk of one row. NORM, PRODUCT:
    the formats to which h / rho and the products with the parameters are rounded; NORM is empty if only y is.
    """
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
    h = single(h)
    counts = is_in_statistic(columns, k, inside)
    if mask is not None:
        counts = is_counted(mask, index, columns, mask_step, mask_stride, counts)
    if parts is None:
        wide = h.to(tl.float64)
        square = wide * wide
        if mask is not None or k is not None:  # else an element outside is 0
            square = tl.where(counts, square, 0.0)
        total = tl.sum(square, 1)[:, None]
    else:
        total = sum_of_parts(parts, index, CHUNKS, ALL)
    alive, size = row < rows, tl.zeros(total.shape, tl.float64) + (n if k is None else k)
    if mask is not None:
        if parts is None:
            size = tl.sum(counts.to(tl.int32), 1)[:, None].to(tl.float64)
        else:
            size = sum_of_parts(parts, rows * count + index, CHUNKS, ALL)
        alive &= size > 0
        size = tl.where(size > 0, size, 1.0)
    rho = rho_of(total / size, size, eps, POSITION)
    inverse = 1 / rho
    if mask is not None:
        inverse = tl.where(alive, inverse, 0.0)
    if inverse_rms is not None:  # noqa: SIM102  (the compiler would read the pointer)
        if chunk == 0:
            tl.store(inverse_rms + index, inverse, mask=row < rows)
    high, low = split(inverse)

    outside = ((rho >= LEAST_RHO) & (rho <= MOST_RHO)) == 0
    if NORM != "":
        t = h * high
        bad = _is_extreme(t, h, 1.0)
        v = single(rounded_near(t, tl.fma(h, -low, tl.fma(h, -high, t)), NORM))
        if scale is not None:
            gain, gain_error = gains(scale, columns, columns < n, OFFSET)
            if OFFSET != 0:
                gain = rounded(gain, gain_error, PRODUCT)
            gain = single(to_format(gain, PRODUCT))
            product = v * gain
            if PRODUCT == "bfloat16":  # a product of float16 is exact, and one of float32 is rounded once
                bad = bad | ((tl.abs(product) < LEAST) & (v != 0) & (gain != 0))
            v = single(to_format(product, PRODUCT))
        if bias is not None:
            total, error = two_sum(v, single(tl.load(bias + columns, mask=columns < n, other=0.0)))
            bad = bad | is_outside(total, 0.0, 0.0)
            v = single(rounded_near(total, 0.0 - error, PRODUCT))
        result = to_format(v, RESULT)
    else:
        product, gain = h, 1.0
        if scale is not None:
            gain, gain_error = gains(scale, columns, columns < n, OFFSET)
            product = h * gain
        t = product * high
        bad = _is_extreme(t, h, gain)
        excess = tl.fma(product, -low, tl.fma(product, -high, t))
        if scale is not None:  # noqa: SIM102  (the compiler would read the dtype of None)
            if OFFSET != 0 or x.dtype.element_ty.primitive_bitwidth + scale.dtype.element_ty.primitive_bitwidth > 32:
                product_error = tl.fma(h, gain, -product)  # else 0
                if OFFSET != 0:
                    product_error = tl.fma(h, gain_error, product_error)
                excess = tl.fma(product_error, -high, excess)
        if bias is not None:
            t, sum_error = two_sum(t, single(tl.load(bias + columns, mask=columns < n, other=0.0)))
            bad = bad | is_outside(t, 0.0, 0.0)
            result = rounded(t, sum_error - excess, RESULT)
        else:
            result = rounded_near(t, excess, RESULT)
    bad = (bad | outside) & alive
    if mask is not None:
        result = tl.where(alive, result, tl.zeros(result.shape, result.dtype))
    tl.store(y + own_row + columns, result, mask=inside)
    if tl.max(bad.to(tl.int32)) > 0:
        tl.debug_barrier()
        for start in range(chunk * BLOCK, tl.minimum(n, (chunk + 1) * BLOCK), STEP // ROWS):
            j = start + tl.arange(0, STEP // ROWS)[None, :]
            within = (row < rows) & (j < n)
            own = load_sum(x, residual, x_row + j, own_row + j, within, FORMAT)
            w = single(own).to(tl.float64)
            if NORM != "":
                w = single(rounded_wide(w / rho, NORM)).to(tl.float64)
                if scale is not None:
                    factor = single(rounded_wide(wide_gains(scale, j, j < n, OFFSET), PRODUCT)).to(tl.float64)
                    w = single(rounded_wide(w * factor, PRODUCT)).to(tl.float64)
                if bias is not None:
                    w += single(tl.load(bias + j, mask=j < n, other=0.0)).to(tl.float64)
                    w = single(rounded_wide(w, PRODUCT)).to(tl.float64)
            else:
                if scale is not None:
                    w = w * wide_gains(scale, j, j < n, OFFSET)
                w = w / rho
                if bias is not None:
                    w += single(tl.load(bias + j, mask=j < n, other=0.0)).to(tl.float64)
            if mask is not None:
                w = tl.where(alive, w, 0.0)
            tl.store(y + own_row + j, rounded_wide(w, RESULT), mask=within)
