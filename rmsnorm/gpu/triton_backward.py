"""The backward pass in Triton.

    dx = (u - h / s <u, h / rho> / k) / rho + dh,    u = (o + scale) dy

with drho / dh = h / (k s). The inner products, and the sums for the gain and the bias, are float64; all else is pairs
of float32, rounded once. A tile with a number out of their range, or with a difference that cancels too much, is
computed again in pairs of float64, in steps, as cpu/native/cancelled.h does.
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
    add_pairs,
    divide_pairs,
    gains,
    group_of_program,
    is_counted,
    is_in_statistic,
    is_outside,
    multiply_pairs,
    rho_of,
    rounded,
    rounded_near,
    rounded_wide,
    single,
    split,
    sum_of_parts,
    two_sum,
    wide_gains,
)

_CANCELS_32: tl.constexpr = tl.constexpr(2.0**-20)  # of the terms of a difference: what 48 bits leave for float32
_CANCELS_16: tl.constexpr = tl.constexpr(2.0**-22)
_ZERO: tl.constexpr = tl.constexpr(2.0**-95)  # of the terms of a difference of pairs of float64


@triton.jit
def sum_parts(
    dy, h, scale, mask, parts, n, k, groups, h_step, mask_step, mask_stride, CHUNKS,
    OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Into ``parts``, of rows by CHUNKS: <u, h> in a chunk of a row; behind them, with a mask, how many count."""
    index, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, group, _ = group_of_program(groups)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    live = is_counted(mask, index, columns, mask_step, mask_stride, columns < n)
    u = single(tl.load(dy + index * n + columns, mask=live, other=0.0)).to(tl.float64)
    if scale is not None:
        u *= wide_gains(scale + group * n, columns, columns < n, OFFSET)
    here = row.to(tl.int64) * h_step + group * n + columns
    v = single(tl.load(h + here, mask=live, other=0.0)).to(tl.float64)
    tl.store(parts + index * CHUNKS + chunk, tl.sum(u * v, 0))
    if mask is not None:
        size = tl.sum(is_in_statistic(columns, k, live).to(tl.int32), 0).to(tl.float64)
        tl.store(parts + (tl.num_programs(0) + index) * CHUNKS + chunk, size)


@triton.jit
def _gain_and_cotangent(dy, scale, offsets, columns, inside, OFFSET: tl.constexpr):
    v = single(tl.load(dy + offsets, mask=inside, other=0.0)).to(tl.float64)
    gain = tl.full(v.shape, 1.0, tl.float64)
    if scale is not None:
        gain = wide_gains(scale, columns, inside, OFFSET)
    return gain, v


@triton.jit
def _recompute(
    h, dy, dh, scale, mask, dx, h_row, own_row, mask_row, mask_stride, inside_rows, alive, first, last,
    n, k, r, size, eps, POSITION: tl.constexpr, OFFSET: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Elements ``first`` to ``last`` of rows of dx, in pairs of float64. Rows begin at ``own_row`` and ``h_row``."""
    WIDTH: tl.constexpr = STEP // ROWS
    j = tl.arange(0, WIDTH)[None, :]
    zero = tl.zeros((ROWS, WIDTH), tl.float64)
    plain, inner, inner_error, square, square_error = zero, zero, zero, zero, zero
    for start in range(0, n, WIDTH):
        columns = start + j
        live = is_counted(mask, mask_row, columns, 1, mask_stride, alive & (columns < n))
        v = single(tl.load(h + h_row + columns, mask=live, other=0.0)).to(tl.float64)
        gain, cotangent = _gain_and_cotangent(dy, scale, own_row + columns, columns, live, OFFSET)
        u = cotangent * gain
        plain += u * v  # in which an infinite number stays one
        product, error = multiply_pairs(u, tl.fma(cotangent, gain, -u), v, 0.0)
        inner, inner_error = add_pairs(inner, inner_error, product, error)
        product, error = multiply_pairs(v, 0.0, v, 0.0)
        counts = is_in_statistic(columns, k, live)
        square, square_error = add_pairs(square, square_error, tl.where(counts, product, 0), tl.where(counts, error, 0))
    plain = tl.sum(plain, 1)[:, None]
    inner, inner_error = tl.reduce((inner, inner_error), 1, add_pairs)
    square, square_error = tl.reduce((square, square_error), 1, add_pairs)
    q = square[:, None] / size
    rho = rho_of(q, size, eps, POSITION)
    slope = tl.full(q.shape, 1.0, tl.float64)
    if POSITION == "inside":
        share = eps / (q + eps)
    elif POSITION == "outside":
        share = eps / rho
        slope = tl.where(q > 0, rho / tl.sqrt(q), 0.0)
    else:
        share = tl.where(tl.sqrt(q) < rho, 1.0, 0.0)
        slope = 1 - share
    along, along_error = divide_pairs(inner, inner_error, square, square_error)
    along, along_error = along[:, None], along_error[:, None]
    step = r * r * slope * plain / size
    by_pairs = (step != 0) & (tl.abs(step) < float("inf"))
    for start in range(first, last, WIDTH):
        columns = start + j
        inside = inside_rows & (columns < last)
        live = is_counted(mask, mask_row, columns, 1, mask_stride, alive & (columns < last))
        v = single(tl.load(h + h_row + columns, mask=live, other=0.0)).to(tl.float64)
        gain, cotangent = _gain_and_cotangent(dy, scale, own_row + columns, columns, live, OFFSET)
        u = cotangent * gain
        near, near_error = multiply_pairs(v, 0.0, along, along_error)
        rest, _ = add_pairs(u, tl.fma(cotangent, gain, -u), -near, -near_error)
        rest = tl.where(tl.abs(rest) <= _ZERO * tl.abs(near), 0.0, rest) + share * near
        counts = is_in_statistic(columns, k, live)
        rest = tl.where(counts, rest, u)
        by_formula = r * (u - tl.where(counts, r * v * slope * (r * plain / size), 0.0))
        gradient = tl.where(by_pairs, rest / rho, by_formula)
        if mask is not None:
            gradient = tl.where(live, gradient, 0.0)
        if dh is not None:
            gradient += single(tl.load(dh + own_row + columns, mask=inside, other=0.0)).to(tl.float64)
        gradient = tl.where(gradient == 0, 0.0, gradient)  # a zero becomes +0
        tl.store(dx + own_row + columns, rounded_wide(gradient, FORMAT), mask=inside)


@triton.jit
def backward(
    h, dy, dh, scale, mask, parts, inverse_rms, dx, dscale, dbias, rows, n, k, groups, h_step, mask_step, mask_stride,
    PROGRAMS, CHUNKS, eps: tl.float64, POSITION: tl.constexpr, OFFSET: tl.constexpr, FORMAT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Tiles i, i + PROGRAMS ... of a group of dx, and the sums over these rows in float64, for dscale and dbias.

    Those are PROGRAMS by n times the number of groups. ``parts``: what sum_parts has written, if rows are split; a
    tile then is a chunk of one row.
    """
    program, group, count = group_of_program(groups)
    chunk = tl.program_id(1)
    if scale is not None:
        scale += group * n
    columns = chunk * BLOCK + tl.arange(0, BLOCK)[None, :]
    dscale_sum = tl.zeros((ROWS, BLOCK), tl.float64)
    dbias_sum = tl.zeros((ROWS, BLOCK), tl.float64)
    for tile in range(program, tl.cdiv(rows, ROWS), PROGRAMS):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        index = row * count + group
        h_row, own_row = row * h_step + group * n, index * n
        inside = (row < rows) & (columns < n)
        r = tl.load(inverse_rms + index, mask=row < rows, other=0.0)
        alive, live, counts = row < rows, inside, is_in_statistic(columns, k, inside)
        size = tl.zeros(r.shape, tl.float64) + (n if k is None else k)
        if mask is not None:
            live = is_counted(mask, index, columns, mask_step, mask_stride, inside)
            counts = live & counts
            if parts is None:
                size = tl.sum(counts.to(tl.int32), 1)[:, None].to(tl.float64)
            else:
                size = sum_of_parts(parts, rows * count + index, CHUNKS, ALL)
            alive &= size > 0
            live &= alive
            size, r = tl.where(alive, size, 1.0), tl.where(alive, r, 1.0)
        v = single(tl.load(h + h_row + columns, mask=live, other=0.0))
        cotangent = single(tl.load(dy + own_row + columns, mask=live, other=0.0))
        product = v.to(tl.float64) * cotangent.to(tl.float64)  # exact
        if dscale is not None:
            total = tl.fma(product, r, dscale_sum)
            if mask is not None:
                total = tl.where(live, total, dscale_sum)  # r may be infinite
            dscale_sum = total
        if dbias is not None:
            dbias_sum += cotangent.to(tl.float64)
        u, u_error, factor = cotangent, 0.0, 1.0
        if scale is not None:
            gain, gain_error = gains(scale, columns, columns < n, OFFSET)  # again for each tile: registers are few
            u, factor = cotangent * gain, gain
            wide_gain = gain.to(tl.float64)
            if OFFSET != 0:
                wide_gain += gain_error
            product *= wide_gain
            if OFFSET != 0 or dy.dtype.element_ty.primitive_bitwidth + scale.dtype.element_ty.primitive_bitwidth > 32:
                u_error = tl.fma(cotangent, gain, -u)  # else 0
                if OFFSET != 0:
                    u_error = tl.fma(cotangent, gain_error, u_error)
        if parts is None:
            inner = tl.sum(product, 1)[:, None] * r
        else:
            inner = sum_of_parts(parts, index, CHUNKS, ALL) * r
        outside = ((r >= 1 / MOST_RHO) & (r <= 1 / LEAST_RHO)) == 0
        slope = tl.full(r.shape, 1.0, tl.float64)
        if POSITION == "outside":
            slope = 1 / (1 - eps * r)
            outside = outside | (eps * r > 0.5)
        elif POSITION == "clamp":
            slope = tl.where(r * (eps / tl.sqrt(size)) < 1 - 2.0**-50, 1.0, 0.0)  # 1 / rho is rounded
        step = r * slope * inner / size
        outside = outside | ((step != 0) & (((tl.abs(step) >= LEAST) & (tl.abs(step) <= MOST)) == 0))
        step_high, step_low = split(step)
        near = v * step_high
        near_error = tl.fma(v, step_low, tl.fma(v, step_high, -near))
        moves = (v != 0) & (step_high != 0)
        if mask is not None or k is not None:  # else v is 0 outside
            near, near_error, moves = tl.where(counts, near, 0.0), tl.where(counts, near_error, 0.0), counts & moves
        rest, rest_error = two_sum(u, -near)
        cancels = _CANCELS_32 if FORMAT == "float32" else _CANCELS_16
        bad = tl.abs(rest) < cancels * tl.abs(near)
        rest_error += u_error - near_error
        high, low = split(r)
        gradient = rest * high
        least = tl.abs(gradient) < LEAST_RESULT
        bad = bad | ((tl.abs(gradient) <= MOST) == 0) | (least & (((cotangent != 0) & (factor != 0)) | moves))
        excess = tl.fma(rest, -low, tl.fma(rest, -high, gradient))
        excess = tl.fma(rest_error, -high, excess)
        gradient = tl.where(gradient == 0, 0.0, gradient)  # a zero becomes +0
        if dh is not None:
            other = single(tl.load(dh + own_row + columns, mask=inside, other=0.0))
            bad = bad | is_outside(other, other, other)
            gradient, sum_error = two_sum(gradient, other)
            gradient = rounded(tl.where(gradient == 0, 0.0, gradient), sum_error - excess, FORMAT)
        else:
            gradient = rounded_near(gradient, excess, FORMAT)
        bad = (bad & inside) | (outside & alive)
        tl.store(dx + own_row + columns, gradient, mask=inside)  # now, so that no register keeps it
        if tl.max(bad.to(tl.int32)) > 0:
            tl.debug_barrier()
            _recompute(
                h, dy, dh, scale, mask, dx, h_row, own_row, index * mask_step, mask_stride, row < rows, alive,
                chunk * BLOCK, tl.minimum(n, (chunk + 1) * BLOCK), n, k, r, size, eps, POSITION, OFFSET, FORMAT, ROWS,
            )  # fmt: skip
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    sums = (program.to(tl.int64) * count + group) * n + columns
    if dscale is not None:
        tl.store(dscale + sums, tl.sum(dscale_sum, 0), mask=columns < n)
    if dbias is not None:
        tl.store(dbias + sums, tl.sum(dbias_sum, 0), mask=columns < n)


@triton.jit
def add_up(
    sums, total, second, programs, n, FORMAT: tl.constexpr, SECOND: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the rows of ``sums``, of programs by n, rounded once; if there is a second total, of those behind."""
    which = tl.program_id(1)
    sums += which.to(tl.int64) * programs * n
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    result = tl.zeros((ROWS, BLOCK), tl.float64)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)[:, None].to(tl.int64)
        result += tl.load(sums + row * n + columns, mask=(row < programs) & (columns < n), other=0.0)
    result = tl.sum(result, 0)[None, :]
    if second is None:
        tl.store(total + columns, rounded_wide(result, FORMAT), mask=columns < n)
    else:
        if which == 0:
            tl.store(total + columns, rounded_wide(result, FORMAT), mask=columns < n)
        else:
            tl.store(second + columns, rounded_wide(result, SECOND), mask=columns < n)
