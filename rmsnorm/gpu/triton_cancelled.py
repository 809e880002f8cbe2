"""A row whose gradient cancels, or is out of range, in Triton: dx in pairs of float64, as in cpu/native/cancelled.h.

Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

import triton
import triton.language as tl

from rmsnorm.gpu.triton_pairs import (
    STEP,
    add_pairs,
    divide_pairs,
    multiply_pairs,
    over_rho,
    rho_of,
    rounded_wide,
    single,
    wide_gains,
)

_ZERO: tl.constexpr = tl.constexpr(2.0**-95)  # of the terms of a difference of pairs of float64


@triton.jit
def gain_and_cotangent(dy, scale, offsets, columns, n, inside, OFFSET: tl.constexpr):
    """Both of a tile in float64, the gain 0 where it takes no part: it may be infinite there."""
    v = single(tl.load(dy + offsets, mask=inside, other=0.0)).to(tl.float64)
    gain = tl.full(v.shape, 1.0, tl.float64)
    if scale is not None:
        gain = tl.where(inside, wide_gains(scale, columns, columns < n, OFFSET), 0.0)
    return gain, v


@triton.jit
def recompute(
    h, dy, dh, scale, dx, h_row, own_row, inside_rows, first, last, n, r, size, eps, POSITION: tl.constexpr,
    OFFSET: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Elements ``first`` to ``last`` of rows of dx, in pairs of float64. Rows begin at ``own_row`` and ``h_row``."""
    WIDTH: tl.constexpr = STEP // ROWS
    j = tl.arange(0, WIDTH)[None, :]
    zero = tl.zeros((ROWS, WIDTH), tl.float64)
    plain, inner, inner_error, square, square_error = zero, zero, zero, zero, zero
    for start in range(0, n, WIDTH):
        columns = start + j
        live = inside_rows & (columns < n)
        v = single(tl.load(h + h_row + columns, mask=live, other=0.0)).to(tl.float64)
        gain, cotangent = gain_and_cotangent(dy, scale, own_row + columns, columns, n, live, OFFSET)
        u = cotangent * gain
        plain += u * v  # in which an infinite number stays one
        product, error = multiply_pairs(u, tl.fma(cotangent, gain, -u), v, 0.0)
        inner, inner_error = add_pairs(inner, inner_error, product, error)
        product, error = multiply_pairs(v, 0.0, v, 0.0)
        square, square_error = add_pairs(square, square_error, product, error)
    plain = tl.sum(plain, 1)[:, None]
    inner, inner_error = tl.reduce((inner, inner_error), 1, add_pairs)
    square, square_error = tl.reduce((square, square_error), 1, add_pairs)
    q = square[:, None] / size
    rho = rho_of(q, size, eps, POSITION)
    slope = tl.full(q.shape, 1.0, tl.float64)
    if POSITION == "inside":
        share, other = eps / (q + eps), q / (q + eps)
    elif POSITION == "outside":
        share, other = eps / rho, tl.sqrt(q) / rho
        slope = tl.where(q > 0, rho / tl.sqrt(q), 0.0)
    else:
        share = tl.where(square[:, None] < eps * eps * (1 - 2.0**-47), 1.0, 0.0)  # CLAMPED of the specification
        slope = 1 - share
        other = slope
    is_short = (rho.to(tl.float32).to(tl.float64) == rho) | ((r > 0) & (r < float("inf")) == 0)
    is_large = share > 0.5  # then u may be small beside the projection, which is multiplied by 1 - share at once
    along, along_error = divide_pairs(inner, inner_error, square, square_error)
    along, along_error = along[:, None], along_error[:, None]
    step = r * r * slope * plain / size
    by_pairs = (step != 0) & (tl.abs(step) < float("inf"))
    for start in range(first, last, WIDTH):
        columns = start + j
        inside = inside_rows & (columns < last)
        v = single(tl.load(h + h_row + columns, mask=inside, other=0.0)).to(tl.float64)
        gain, cotangent = gain_and_cotangent(dy, scale, own_row + columns, columns, n, inside, OFFSET)
        u = cotangent * gain
        near, near_error = multiply_pairs(v, 0.0, along, along_error)
        beside = tl.where(is_large, 0.0, share * near)
        near, near_error = multiply_pairs(near, near_error, tl.where(is_large, other, 1.0), 0.0)
        rest, _ = add_pairs(u, tl.fma(cotangent, gain, -u), -near, -near_error)
        rest = tl.where(tl.abs(rest) <= _ZERO * tl.abs(near), 0.0, rest) + beside
        by_formula = r * (u - r * v * slope * (r * plain / size))
        gradient = tl.where(by_pairs, over_rho(rest, r, rho, is_short), by_formula)
        if dh is not None:
            gradient += single(tl.load(dh + own_row + columns, mask=inside, other=0.0)).to(tl.float64)
        gradient = tl.where(gradient == 0, 0.0, gradient)  # a zero becomes +0
        tl.store(dx + own_row + columns, rounded_wide(gradient, FORMAT), mask=inside)
