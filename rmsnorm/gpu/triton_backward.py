"""The backward pass in Triton.

    dx = (u - h / s <u, h / rho> / k) / rho + dh,    u = (o + scale) dy

with drho / dh = h / (k s), in float64 (``triton_gradient``). A tile with a number out of its range, or with a
difference that cancels too much, is computed again in pairs of float64, in steps, as cpu/native/cancelled.h does. The
loop over rows has no branch, with which Triton would not read ahead: each thread keeps the first and the last tile
that it noted, and behind the loop these are computed again; if a row was out of range, all tiles of the program are,
with the sums for the gain. Those sums are float64, h times (dy / rho), in the order that the shape alone decides.
Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

import triton
import triton.language as tl

from rmsnorm.gpu.triton_cancelled import recompute
from rmsnorm.gpu.triton_gradient import (
    LEAST_SIZE,
    MOST_SIZE,
    anew,
    are_inexact,
    gains_in_pairs,
    gradient_in_pairs,
    gradient_of,
    inner_in_pairs,
    product_of,
    step_in_pairs,
    step_of,
)
from rmsnorm.gpu.triton_pairs import (
    group_of_program,
    lowered,
    rounded_wide,
    single,
    split,
    split_argument,
    sum_of_parts,
    two_sum,
    wide_gains,
)


@triton.jit
def sum_parts(
    dy, h, scale, parts, n, groups, h_step, CHUNKS,
    OFFSET: tl.constexpr, BLOCK: tl.constexpr, FLOAT64: tl.constexpr,
):  # fmt: skip
    """Into ``parts``, of rows by CHUNKS: <u, h> in a chunk of a row."""
    index, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, group, _ = group_of_program(groups)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    cotangent = tl.load(dy + index * n + columns, mask=columns < n, other=0.0)
    here = row.to(tl.int64) * h_step + group * n + columns
    v = tl.load(h + here, mask=columns < n, other=0.0)
    if FLOAT64:
        u = single(cotangent).to(tl.float64)
        if scale is not None:
            u *= wide_gains(scale + group * n, columns, columns < n, OFFSET)
        total = tl.sum(u * single(v).to(tl.float64), 0)
    else:
        gain, rest = gains_in_pairs(scale if scale is None else scale + group * n, columns, n, OFFSET)
        gain_error = None
        if scale is not None:  # noqa: SIM102  (the compiler would read the dtype of None)
            if OFFSET != 0 or scale.dtype.element_ty == tl.float32 or dy.dtype.element_ty == tl.float32:
                gain_error = rest  # else u is exact
        near, error = inner_in_pairs(v, cotangent, gain, gain_error, 0)
        total = near.to(tl.float64) + error.to(tl.float64)
    tl.store(parts + index * CHUNKS + chunk, total)


@triton.jit
def _read(
    h, dy, inverse_rms, rows, n, tile, group, count, columns, h_step, share, ROWS: tl.constexpr,
):  # fmt: skip
    """h and dy of a tile, 0 outside; 1 / rho; which elements are inside; and sizes."""
    row = tile * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    index = row * count + group
    inside = (row < rows) & (columns < n)
    r = tl.load(inverse_rms + index, mask=row < rows, other=1.0)
    size, part = tl.zeros(r.shape, tl.float64) + n, tl.zeros(r.shape, tl.float64) + share
    v = tl.load(h + row * h_step + group * n + columns, mask=inside, other=0.0)
    cotangent = tl.load(dy + index * n + columns, mask=inside, other=0.0)
    return v, cotangent, r, row < rows, inside, size, part, index


@triton.jit
def _finish(
    v, cotangent, gain, gain_error, inner, inner_error, r, alive, size, share, part, index, dh, dx,
    dscale_sum, dscale_error, dbias_sum, dbias_error, first, last, has_special, tile, rows, count, n, columns, eps,
    POSITION: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, FLOAT64: tl.constexpr,
):  # fmt: skip
    """Writes a tile of dx. Returns the sums, the first and last tile that is inexact, and whether a row is special."""
    offsets, inside, other = index * n + columns, (index < tl.cast(rows, tl.int64) * count) & (columns < n), None
    if dh is not None:
        other = tl.load(dh + offsets, mask=inside, other=0.0)
    if FLOAT64:
        step, special = step_of(inner, r, alive, size, part, eps, POSITION, True)
        result, total, margin = gradient_of(anew(v), anew(cotangent), gain, step, r, other, dscale_sum, FORMAT, False)
        error = dscale_error
    else:
        near, near_error = split(r)
        share, share_error = split_argument(share)
        size, _ = split(size)
        step, step_error, special = step_in_pairs(
            inner, inner_error, near, near_error, share, share_error, alive, size, eps, POSITION
        )
        result, total, error, margin = gradient_in_pairs(
            v, cotangent, gain, gain_error, step, step_error, near, near_error, other, dscale_sum, dscale_error, FORMAT,
        )  # fmt: skip
    if HAS_SCALE:
        dscale_sum, dscale_error = total, error
    if HAS_BIAS:
        if FLOAT64:
            dbias_sum += single(cotangent).to(tl.float64)
        else:
            dbias_sum, error = two_sum(dbias_sum, single(cotangent))
            dbias_error += error
    tl.store(dx + offsets, result, mask=inside)
    is_inexact = are_inexact(margin, v, step, FORMAT, ROWS, BLOCK)
    first, last = tl.where(is_inexact, tl.minimum(first, tile), first), tl.where(is_inexact, tile, last)
    return dscale_sum, dscale_error, dbias_sum, dbias_error, first, last, has_special | special.to(tl.int32)


@triton.jit
def backward(
    h, dy, dh, scale, parts, inverse_rms, dx, dscale, dbias, rows, n, groups, h_step, PROGRAMS, CHUNKS, eps: tl.float64,
    share: tl.float64, POSITION: tl.constexpr, OFFSET: tl.constexpr,
    FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    FLOAT64: tl.constexpr, EIGHTS: tl.constexpr,
):  # fmt: skip
    """Tiles i, i + PROGRAMS ... of a group of dx, and the sums over these rows in float64, for dscale and dbias.

    Those are PROGRAMS by n times the number of groups. ``parts``: what sum_parts has written, if rows are split; a
    tile then is a chunk of one row. The loop over tiles has no branch, so that the compiler reads ahead. Tiles in
    which some element was not exact are computed again behind it, and the sums, if a row was special.
    EIGHTS: as forward.
    """
    if EIGHTS:
        n, h_step = n // 8 * 8, h_step // 8 * 8
    program, group, count = group_of_program(groups)
    chunk = tl.program_id(1)
    if scale is not None:
        scale += group * n
    columns = chunk * BLOCK + tl.arange(0, BLOCK)[None, :]
    first = tl.full((ROWS, BLOCK // (4 if FORMAT == "float32" else 8), 1), 2**31 - 1, tl.int32)
    last, has_special = tl.zeros(first.shape, tl.int32) - 1, tl.zeros((ROWS, 1), tl.int32)
    gain, gain_error = tl.full(columns.shape, 2.0**-896, tl.float64), None
    if not FLOAT64:
        gain, rest = gains_in_pairs(scale, columns, n, OFFSET)
        if scale is not None:  # noqa: SIM102  (the compiler would read the dtype of None)
            if OFFSET != 0 or scale.dtype.element_ty == tl.float32 or dy.dtype.element_ty == tl.float32:
                gain_error = rest  # else u is exact
    elif scale is not None:
        own = tl.load(scale + columns, mask=columns < n, other=0.0)
        gain = lowered(own) + OFFSET * 2.0**-896
        is_finite = tl.abs(single(own)) < float("inf")  # which ``lowered`` asks
        has_special += 1 - tl.min(is_finite.to(tl.int32))
    dscale_sum = tl.zeros((ROWS, BLOCK), tl.float64 if FLOAT64 else tl.float32)
    dscale_error = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias_sum, dbias_error = dscale_sum, dscale_error
    tiles = tl.cdiv(rows, ROWS)
    for tile in tl.range(program, tiles, PROGRAMS, num_stages=STAGES):
        v, cotangent, r, alive, _, size, part, index = _read(
            h, dy, inverse_rms, rows, n, tile, group, count, columns, h_step, share, ROWS
        )
        inner_error = None
        if parts is not None:
            inner = sum_of_parts(parts, index, CHUNKS, BLOCK)
            if not FLOAT64:
                inner, inner_error = split(inner)
        elif FLOAT64:
            inner = tl.sum(product_of(v, cotangent, gain, False), 1)[:, None] * 2.0**896
        else:
            inner, inner_error = inner_in_pairs(v, cotangent, gain, gain_error, 1)
            inner, inner_error = inner[:, None], inner_error[:, None]
        dscale_sum, dscale_error, dbias_sum, dbias_error, first, last, has_special = _finish(
            v, cotangent, gain, gain_error, inner, inner_error, r, alive, size, share, part, index, dh, dx,
            dscale_sum, dscale_error, dbias_sum, dbias_error, first, last, has_special, tile, rows, count, n,
            columns, eps, POSITION, dscale is not None, dbias is not None, FORMAT, ROWS, BLOCK,
            FLOAT64,
        )  # fmt: skip
    if not FLOAT64:
        extent = tl.abs(dscale_sum)
        is_usual = (extent == 0) | ((extent >= LEAST_SIZE) & (extent <= MOST_SIZE)) | (dscale is None)
        has_special += 1 - tl.min(is_usual.to(tl.int32))
        dscale_sum = dscale_sum.to(tl.float64) + dscale_error.to(tl.float64)
        error = tl.where(dbias_error == dbias_error, dbias_error, 0.0)  # of an infinite sum it is NaN
        dbias_sum = dbias_sum.to(tl.float64) + error.to(tl.float64)
    begin, end, again = tl.min(first), tl.max(last) + 1, tl.max(has_special) > 0
    if again:
        begin, end = program, tiles
    if begin < end:
        wide_gain = tl.full(columns.shape, 1.0, tl.float64)
        if scale is not None:
            wide_gain = wide_gains(scale, columns, columns < n, OFFSET)
        if again:
            dscale_sum = tl.zeros((ROWS, BLOCK), tl.float64)
        for tile in range(begin, end, PROGRAMS):
            v, cotangent, r, alive, inside, size, part, index = _read(
                h, dy, inverse_rms, rows, n, tile, group, count, columns, h_step, share, ROWS
            )
            if parts is None:
                inner = tl.sum(product_of(v, cotangent, wide_gain, True), 1)[:, None]
            else:
                inner = sum_of_parts(parts, index, CHUNKS, BLOCK)
            step, special = step_of(inner, r, alive, size, part, eps, POSITION, FLOAT64)
            _, total, margin = gradient_of(v, cotangent, wide_gain, step, r, None, dscale_sum, FORMAT, True, FLOAT64)
            dscale_sum = tl.where(inside & again, total, dscale_sum)
            is_inexact = are_inexact(margin, v, step, FORMAT, ROWS, BLOCK)
            if (tl.max(is_inexact.to(tl.int32)) > 0) | (tl.max(special.to(tl.int32)) > 0):
                tl.debug_barrier()
                row = tile * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
                recompute(
                    h, dy, dh, scale, dx, row * h_step + group * n, index * n, row < rows,
                    chunk * BLOCK, tl.minimum(n, (chunk + 1) * BLOCK), n, r, size, eps, POSITION, OFFSET, FORMAT, ROWS,
                )  # fmt: skip
    sums = (program.to(tl.int64) * count + group) * n + chunk * BLOCK + tl.arange(0, BLOCK)
    is_column = chunk * BLOCK + tl.arange(0, BLOCK) < n
    if dscale is not None:
        tl.store(dscale + sums, tl.sum(dscale_sum, 0), mask=is_column)
    if dbias is not None:
        tl.store(dbias + sums, tl.sum(dbias_sum, 0), mask=is_column)


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
