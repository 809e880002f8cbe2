"""The backward pass in Triton.

    dx = (u - h / s <u, h / rho> / k) / rho + dh,    u = (o + scale) dy

with drho / dh = h / (k s), in float64 (docs/gpu-arithmetic.md derives the bounds). A tile with a number out of its
range, or with a difference that cancels too much, is computed again in pairs of float64, in steps, as
cpu/native/cancelled.h does. Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

import triton
import triton.language as tl

from rmsnorm.gpu.triton_pairs import (
    INTERPRETED,
    LEAST_RHO,
    MOST,
    MOST_RHO,
    STEP,
    add_pairs,
    cut,
    divide_pairs,
    gains,
    group_of_program,
    is_counted,
    is_in_statistic,
    lowered,
    multiply_pairs,
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

CANCELS: tl.constexpr = tl.constexpr(2.0**-26)  # of h B, what dx must have at least: 53 bits leave it 26
CANCELS_TOGETHER: tl.constexpr = tl.constexpr(2.0**-12)  # the same of neighbours in float32
CANCELS_IN_PAIRS: tl.constexpr = tl.constexpr(2.0**-19)  # of h B, where pairs of float32 are subtracted
LEAST_SIZE: tl.constexpr = tl.constexpr(2.0**-80)  # of inner products and results in pairs of float32, and the most
MOST_SIZE: tl.constexpr = tl.constexpr(2.0**80)
LEAST_STEP: tl.constexpr = tl.constexpr(2.0**-60)  # of B: below it products that float32 loses would count
_ZERO: tl.constexpr = tl.constexpr(2.0**-95)  # of the terms of a difference of pairs of float64


def _steps(name: str, has_sum: bool) -> str:
    """The steps of ``_gradient`` for an element of 32 bits or two of 16, one after the other: for few registers.

    Operands: dx, sums, margins; h, dy, the gain, sums, 1 / rho, B, a part of B, and what is added to dx.
    """
    each = 1 if name == "float32" else 2
    operands = (f"${i}" for i in range(18))
    dx, *results = (next(operands) for _ in range(1 + 2 * each))
    out, margin = results[:each], results[each:]
    sources = {"x": next(operands), "y": next(operands)}
    gain, sums, inverse, step, part = ([next(operands) for _ in range(each)] for _ in range(5))
    if has_sum:
        sources["o"] = next(operands)
    text = "{ .reg .b32 x0, x1, y0, y1, o0, o1, s0, s1, e, f, lo, hi, a; .reg .b16 p, q; .reg .pred odd; "
    text += ".reg .b64 w, u, t; "
    for own, source in sources.items():
        text += {
            "float32": f"mov.b32 {own}0, {source}; ",
            "bfloat16": f"shl.b32 {own}0, {source}, 16; and.b32 {own}1, {source}, 0xffff0000; ",
            "float16": f"mov.b32 {{p, q}}, {source}; cvt.f32.f16 {own}0, p; cvt.f32.f16 {own}1, q; ",
        }[name]
    for i in range(each):
        to_odd = f"cvt.rz.f32.f64 s{i}, t; mov.b64 {{lo, hi}}, t; and.b32 lo, lo, 0x1fffffff; "
        to_odd += f"setp.ne.u32 odd, lo, 0; @odd or.b32 s{i}, s{i}, 1; "
        to_single = f"cvt.rn.f32.f64 s{i}, t; " if name == "float32" else to_odd
        text += f"shr.s32 e, x{i}, 3; and.b32 e, e, 0x8fffffff; "
        text += f"shl.b32 f, x{i}, 29; " if name == "float32" else "mov.b32 f, 0; "
        text += (
            f"mov.b64 w, {{f, e}}; cvt.f64.f32 u, y{i}; mul.rn.f64 u, u, {inverse[i]}; "
            f"fma.rn.f64 t, w, {step[i]}, 0d0000000000000000; fma.rn.f64 {out[i]}, w, u, {sums[i]}; "
            f"fma.rn.f64 t, u, {gain[i]}, t; {to_single}"
            f"abs.f32 a, s{i}; mul.rn.f32 e, x{i}, {part[i]}; abs.f32 e, e; sub.rn.f32 {margin[i]}, a, e; "
        )
        if has_sum:
            text += f"cvt.f64.f32 u, o{i}; add.rn.f64 t, t, u; {to_single}"
    packs = {"bfloat16": f"cvt.rn.bf16x2.f32 {dx}, s1, s0; ", "float16": f"cvt.rn.f16x2.f32 {dx}, s1, s0; "}
    return text + packs.get(name, f"mov.b32 {dx}, s0; ") + "}"


STEPS_32, SUM_32 = (tl.constexpr(_steps("float32", has_sum)) for has_sum in (False, True))
STEPS_B, SUM_B = (tl.constexpr(_steps("bfloat16", has_sum)) for has_sum in (False, True))
STEPS_F, SUM_F = (tl.constexpr(_steps("float16", has_sum)) for has_sum in (False, True))


@triton.jit
def sum_parts(
    dy, h, scale, mask, parts, n, k, groups, h_step, mask_step, mask_stride, CHUNKS,
    OFFSET: tl.constexpr, BLOCK: tl.constexpr, FLOAT64: tl.constexpr,
):  # fmt: skip
    """Into ``parts``, of rows by CHUNKS: <u, h> in a chunk of a row; behind them, with a mask, how many count."""
    index, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, group, _ = group_of_program(groups)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    live = is_counted(mask, index, columns, mask_step, mask_stride, columns < n)
    cotangent = tl.load(dy + index * n + columns, mask=live, other=0.0)
    v = tl.load(h + row.to(tl.int64) * h_step + group * n + columns, mask=live, other=0.0)
    if FLOAT64:
        u = single(cotangent).to(tl.float64)
        if scale is not None:
            u *= wide_gains(scale + group * n, columns, columns < n, OFFSET)
        total = tl.sum(u * single(v).to(tl.float64), 0)
    else:
        gain, rest = _gains_in_pairs(scale if scale is None else scale + group * n, columns, n, OFFSET)
        gain_error = None
        if scale is not None:  # noqa: SIM102  (the compiler would read the dtype of None)
            if OFFSET != 0 or scale.dtype.element_ty == tl.float32 or dy.dtype.element_ty == tl.float32:
                gain_error = rest  # else u is exact
        near, error = _inner_in_pairs(v, cotangent, gain, gain_error, 0)
        total = near.to(tl.float64) + error.to(tl.float64)
    tl.store(parts + index * CHUNKS + chunk, total)
    if mask is not None:
        size = tl.sum(is_in_statistic(columns, k, live).to(tl.int32), 0).to(tl.float64)
        tl.store(parts + (tl.num_programs(0) + index) * CHUNKS + chunk, size)


@triton.jit
def _gain_and_cotangent(dy, scale, offsets, columns, n, inside, OFFSET: tl.constexpr):
    """Both of a tile in float64, the gain 0 where it takes no part: it may be infinite there."""
    v = single(tl.load(dy + offsets, mask=inside, other=0.0)).to(tl.float64)
    gain = tl.full(v.shape, 1.0, tl.float64)
    if scale is not None:
        gain = tl.where(inside, wide_gains(scale, columns, columns < n, OFFSET), 0.0)
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
        gain, cotangent = _gain_and_cotangent(dy, scale, own_row + columns, columns, n, live, OFFSET)
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
        share, other = eps / (q + eps), q / (q + eps)
    elif POSITION == "outside":
        share, other = eps / rho, tl.sqrt(q) / rho
        slope = tl.where(q > 0, rho / tl.sqrt(q), 0.0)
    else:
        share = tl.where(tl.sqrt(q) < rho, 1.0, 0.0)
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
        live = is_counted(mask, mask_row, columns, 1, mask_stride, alive & (columns < last))
        v = single(tl.load(h + h_row + columns, mask=live, other=0.0)).to(tl.float64)
        gain, cotangent = _gain_and_cotangent(dy, scale, own_row + columns, columns, n, live, OFFSET)
        u = cotangent * gain
        near, near_error = multiply_pairs(v, 0.0, along, along_error)
        beside = tl.where(is_large, 0.0, share * near)
        near, near_error = multiply_pairs(near, near_error, tl.where(is_large, other, 1.0), 0.0)
        rest, _ = add_pairs(u, tl.fma(cotangent, gain, -u), -near, -near_error)
        rest = tl.where(tl.abs(rest) <= _ZERO * tl.abs(near), 0.0, rest) + beside
        counts = is_in_statistic(columns, k, live)
        rest = tl.where(counts, rest, u)
        by_formula = r * (u - tl.where(counts, r * v * slope * (r * plain / size), 0.0))
        gradient = tl.where(by_pairs, over_rho(rest, r, rho, is_short), by_formula)
        if mask is not None:
            gradient = tl.where(live, gradient, 0.0)
        if dh is not None:
            gradient += single(tl.load(dh + own_row + columns, mask=inside, other=0.0)).to(tl.float64)
        gradient = tl.where(gradient == 0, 0.0, gradient)  # a zero becomes +0
        tl.store(dx + own_row + columns, rounded_wide(gradient, FORMAT), mask=inside)


@triton.jit
def _again(tensor):
    """The same numbers, which the compiler takes for others: so it unpacks them again, and keeps no float64 of them."""
    PACK: tl.constexpr = 1 if tensor.dtype == tl.float32 else 2
    if INTERPRETED:
        return tensor
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tensor], tensor.dtype, True, PACK)


@triton.jit
def _odd_single(number):
    """A float64 rounded to odd in float32, for one more rounding; of a result that float32 has subnormal, almost."""
    if INTERPRETED:
        single_ = cut(number, 0.0)
        is_inexact = (number.to(tl.int64, bitcast=True) & 0x1FFFFFFF) != 0
        odd = single_.to(tl.int32, bitcast=True) | is_inexact.to(tl.int32)
        return odd.to(tl.float32, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 lo, hi; .reg .pred p; mov.b64 {lo, hi}, $1; cvt.rz.f32.f64 $0, $1; "
            "and.b32 lo, lo, 0x1fffffff; setp.ne.u32 p, lo, 0; @p or.b32 $0, $0, 1; }",
            "=r,d",
            [number],
            tl.float32,
            True,
            1,
        )


@triton.jit
def _to_single(number, FORMAT: tl.constexpr):
    """A float64 as a float32: rounded if that is the format, else rounded to odd."""
    if FORMAT == "float32":
        return number.to(tl.float32)
    else:
        return _odd_single(number)


@triton.jit
def _read(
    h, dy, mask, parts, inverse_rms, rows, n, k, groups, tile, group, count, columns, h_step, mask_step, mask_stride,
    CHUNKS, share, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """h and dy of a tile, 0 where they take no part; what counts; 1 / rho, of rows that have one; and sizes."""
    row = tile * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    index = row * count + group
    inside = (row < rows) & (columns < n)
    r = tl.load(inverse_rms + index, mask=row < rows, other=1.0)
    alive, live, counts = row < rows, inside, is_in_statistic(columns, k, inside)
    size = tl.zeros(r.shape, tl.float64) + (n if k is None else k)
    part = tl.zeros(r.shape, tl.float64) + share
    if mask is not None:
        live = is_counted(mask, index, columns, mask_step, mask_stride, inside)
        counts = live & counts
        if parts is None:
            size = tl.sum(counts.to(tl.int32), 1)[:, None].to(tl.float64)
        else:
            size = sum_of_parts(parts, rows * count + index, CHUNKS, BLOCK)
        alive &= size > 0
        live &= alive
        size, r = tl.where(alive, size, 1.0), tl.where(alive, r, 1.0)
        part = 1 / size
    v = tl.load(h + row * h_step + group * n + columns, mask=live, other=0.0)
    cotangent = tl.load(dy + index * n + columns, mask=live, other=0.0)
    return v, cotangent, r, alive, live, counts, size, part, index


@triton.jit
def _negative(number):
    """A float32 times -1 in float64: not what follows needs, lest the compiler keep 32 more registers of it."""
    if INTERPRETED:
        return -number.to(tl.float64)
    else:
        text: tl.constexpr = "{ .reg .b32 s; neg.f32 s, $1; cvt.f64.f32 $0, s; }"
        return tl.inline_asm_elementwise(text, "=d,r", [number], tl.float64, True, 1)


@triton.jit
def _product(v, cotangent, gain, SAFE: tl.constexpr):
    """u h; of 16 bits and unless SAFE, h dy is a float32, which has it or is not finite, or is too small to count."""
    if SAFE or v.dtype == tl.float32 or cotangent.dtype == tl.float32:
        return single(v).to(tl.float64) * _negative(single(cotangent)) * -gain
    else:
        return (single(v) * single(cotangent)).to(tl.float64) * gain


@triton.jit
def _gains_in_pairs(scale, columns, n, OFFSET: tl.constexpr):
    """o + scale as a pair of float32."""
    if scale is None:
        return tl.full(columns.shape, 1.0, tl.float32), tl.zeros(columns.shape, tl.float32)
    else:
        return gains(scale, columns, columns < n, OFFSET)


@triton.jit
def _inner_in_pairs(v, cotangent, gain, gain_error, AXIS: tl.constexpr):
    """The sum of u h as a pair of float32. gain_error: None if u is exact."""
    h, y, error = single(v), single(cotangent), None
    u = y * gain
    product = u * h
    if gain_error is not None:
        error = tl.fma(tl.fma(y, gain_error, tl.fma(y, gain, -u)), h, tl.fma(u, h, -product))
    elif v.dtype == tl.float16 or cotangent.dtype == tl.float16:
        error = tl.fma(u, h, -product)
    return sum_of_pairs(product, error, AXIS)


@triton.jit
def _step(inner, r, alive, size, part, eps, POSITION: tl.constexpr, FLOAT64: tl.constexpr):
    """B of dx = u / rho - h B, and in which rows dx must be computed in another way; unless FLOAT64, in more."""
    special = ((r >= 1 / MOST_RHO) & (r <= 1 / LEAST_RHO)) == 0
    step = inner * (r * r * r * part)
    if POSITION == "outside":
        step *= 1 / (1 - eps * r)
        special = special | (eps * r > 0.5)
    elif POSITION == "clamp":
        step *= tl.where(r * (eps / tl.sqrt(size)) < 1 - 2.0**-50, 1.0, 0.0)  # 1 / rho is rounded
    special = special | ((step != 0) & (((tl.abs(step) >= LEAST_STEP) & (tl.abs(step) <= MOST)) == 0))
    if not FLOAT64:
        special = special | ((inner != 0) & ((tl.abs(inner) <= 2 * LEAST_SIZE) | (tl.abs(inner) >= MOST_SIZE / 2)))
        if POSITION == "clamp":
            special = special | (r * (eps / tl.sqrt(size)) > 1 - 2.0**-18)
    return step, special & alive


@triton.jit
def _step_in_pairs(inner, inner_error, r, r_error, part, part_error, alive, size, eps, POSITION: tl.constexpr):
    """The same as a pair of float32."""
    special = ((r >= 1 / MOST_RHO) & (r <= 1 / LEAST_RHO)) == 0
    special = special | ((inner != 0) & (((tl.abs(inner) >= LEAST_SIZE) & (tl.abs(inner) <= MOST_SIZE)) == 0))
    square, square_error = multiply_pairs(r, r_error, r, r_error)
    part, part_error = multiply_pairs(part, part_error, r, r_error)
    part, part_error = multiply_pairs(part, part_error, square, square_error)
    step, step_error = multiply_pairs(inner, inner_error, part, part_error)
    added, added_error = split_argument(eps)
    if POSITION == "outside":
        share, share_error = multiply_pairs(r, r_error, added, added_error)
        special = special | (share > 0.5)
        share, share_error = add_pairs(1.0, 0.0, -share, -share_error)
        step, step_error = divide_pairs(step, step_error, share, share_error)
    elif POSITION == "clamp":
        special = special | (r * added > tl.sqrt_rn(size) * (1 - 2.0**-19))
    special = special | ((step != 0) & (((tl.abs(step) >= 2 * LEAST_STEP) & (tl.abs(step) <= MOST / 2)) == 0))
    return step, step_error, special & alive


@triton.jit
def _gradient(
    v, cotangent, gain, step, r, other, dscale_sum, counts, HAS_COUNTS: tl.constexpr, FORMAT: tl.constexpr,
    SAFE: tl.constexpr, FLOAT64: tl.constexpr = True,
):  # fmt: skip
    """dx + other, the sums for the gain, and numbers that are negative where dx is inexact.

    Unless SAFE, h and the gain are 2^-896 times as large, and what they are multiplied by 2^896 times.
    """
    LIFT: tl.constexpr = 1.0 if SAFE else 2.0**896
    if INTERPRETED or SAFE or HAS_COUNTS or cotangent.dtype != v.dtype:
        wide = single(v).to(tl.float64) if SAFE else lowered(v)
        near = wide * (step * -LIFT)
        if HAS_COUNTS:  # else h is 0 where it does not count
            near = tl.where(counts, near, 0.0)
        pulled = single(cotangent).to(tl.float64) * (r * LIFT)
        gradient = tl.fma(pulled, gain, near + 0.0)
        if SAFE:  # r may be 0 or infinite, and then the order counts
            dscale_sum = tl.fma(wide * single(cotangent).to(tl.float64), r, dscale_sum)
        else:
            dscale_sum = tl.fma(wide, pulled, dscale_sum)
        dx = _to_single(gradient, FORMAT)
        margin = tl.abs(dx) - tl.abs(single(v) * (step * (CANCELS if FLOAT64 else CANCELS_IN_PAIRS)).to(tl.float32))
        if not FLOAT64:
            is_usual = (tl.abs(dx) >= 2 * LEAST_SIZE) & (tl.abs(dx) <= MOST_SIZE / 2)
            margin = tl.where(is_usual | ((cotangent == 0) & (near == 0)), margin, -1.0)
        if other is not None:
            dx = _to_single(gradient + single(other).to(tl.float64), FORMAT)
        return to_format(dx, FORMAT), dscale_sum, margin
    else:
        PACK: tl.constexpr = 1 if FORMAT == "float32" else 2
        SLOTS: tl.constexpr = "=r,=d,=r,r,r,d,d,d,d,r" if PACK == 1 else "=r,=d,=d,=r,=r,r,r,d,d,d,d,d,d,d,d,r,r"
        lifted, lifted_step, part = r * LIFT, step * -LIFT, (step * CANCELS).to(tl.float32)
        if other is None:
            TEXT: tl.constexpr = STEPS_32 if FORMAT == "float32" else STEPS_B if FORMAT == "bfloat16" else STEPS_F
            return tl.inline_asm_elementwise(
                TEXT, SLOTS, [v, cotangent, gain, dscale_sum, lifted, lifted_step, part],
                (v.dtype, tl.float64, tl.float32), True, PACK,
            )  # fmt: skip
        else:
            SUM: tl.constexpr = SUM_32 if FORMAT == "float32" else SUM_B if FORMAT == "bfloat16" else SUM_F
            return tl.inline_asm_elementwise(
                SUM, SLOTS + ",r", [v, cotangent, gain, dscale_sum, lifted, lifted_step, part, other],
                (v.dtype, tl.float64, tl.float32), True, PACK,
            )  # fmt: skip


@triton.jit
def _is_inexact(margin, v, step, FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Whether dx is inexact in what a thread reads at once: an element that cancels or, of 32 bits, all that cancel.

    In a row whose gradient cancels, as that of (norm(x)**2).sum(), float64 leaves float32 too little of each element.
    """
    SHAPE: tl.constexpr = (ROWS, BLOCK // 4, 4) if FORMAT == "float32" else (ROWS, BLOCK // 8, 8)
    is_inexact = tl.min(tl.reshape(margin, SHAPE), 2, keep_dims=True) < 0
    if FORMAT == "float32":
        margin -= tl.abs(single(v) * (step * CANCELS_TOGETHER).to(tl.float32))
        is_inexact = is_inexact | (tl.max(tl.reshape(margin, SHAPE), 2, keep_dims=True) < 0)
    return is_inexact


@triton.jit
def _gradient_in_pairs(
    v, cotangent, gain, gain_error, step, step_error, r, r_error, other, sums, sums_error, counts,
    HAS_COUNTS: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """The same of pairs of float32."""
    h, y = single(v), single(cotangent)
    u, product = y * gain, h * y
    far = u * r
    far_error = tl.fma(u, r_error, tl.fma(u, r, -far))
    if HAS_COUNTS:
        h = tl.where(counts, h, 0.0)
    near = h * -step
    near_error = tl.fma(h, -step_error, tl.fma(h, -step, -near))
    if gain_error is not None:
        far_error = tl.fma(tl.fma(y, gain_error, tl.fma(y, gain, -u)), r, far_error)
    total, error = two_sum(far, near)
    error += far_error + near_error
    total += 0.0  # a zero becomes +0
    dx = rounded_near(total, -error, FORMAT)
    size = tl.abs(total)
    margin = size - tl.abs(h * (step * CANCELS_IN_PAIRS))
    is_usual = (size >= LEAST_SIZE) & (size <= MOST_SIZE)
    is_zero = tl.fma(tl.abs(h), (step != 0).to(tl.float32), tl.abs(u)) == 0
    margin = tl.where(is_usual | is_zero, margin, -1.0)
    if other is not None:
        total, rest = two_sum(total, single(other))
        dx = rounded(total, tl.where(tl.abs(total) < float("inf"), rest + error, 0.0), FORMAT)
    new = tl.fma(product, r, sums)
    t = new - sums
    sums_error += (sums - (new - t)) + tl.fma(product, r, -t)
    sums_error = tl.fma(product, r_error, sums_error)
    if cotangent.dtype == tl.float32:
        sums_error = tl.fma(tl.fma(single(v), y, -product), r, sums_error)
    return dx, new, sums_error, margin


@triton.jit
def _finish(
    v, cotangent, gain, gain_error, inner, inner_error, r, alive, live, counts, size, share, part, index, dh, dx,
    dscale_sum, dscale_error, dbias_sum, dbias_error, first, last, has_special, tile, rows, count, n, columns, eps,
    mask, POSITION: tl.constexpr, HAS_COUNTS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FLOAT64: tl.constexpr,
):  # fmt: skip
    """Writes a tile of dx. Returns the sums, the first and last tile that is inexact, and whether a row is special."""
    offsets, inside, other = index * n + columns, (index < tl.cast(rows, tl.int64) * count) & (columns < n), None
    if dh is not None:
        other = tl.load(dh + offsets, mask=inside, other=0.0)
    if FLOAT64:
        step, special = _step(inner, r, alive, size, part, eps, POSITION, True)
        result, total, margin = _gradient(
            _again(v), _again(cotangent), gain, step, r, other, dscale_sum, counts, HAS_COUNTS, FORMAT, False
        )
        error = dscale_error
    else:
        near, near_error = split(r)
        share, share_error = split_argument(share)
        size, size_error = split(size)
        if mask is not None:
            share, share_error = divide_pairs(1.0, 0.0, size, size_error)
        step, step_error, special = _step_in_pairs(
            inner, inner_error, near, near_error, share, share_error, alive, size, eps, POSITION
        )
        result, total, error, margin = _gradient_in_pairs(
            v, cotangent, gain, gain_error, step, step_error, near, near_error, other, dscale_sum, dscale_error, counts,
            HAS_COUNTS, FORMAT,
        )  # fmt: skip
    if HAS_SCALE:
        if mask is not None:  # r may be infinite
            total, error = tl.where(live, total, dscale_sum), tl.where(live, error, dscale_error)
        dscale_sum, dscale_error = total, error
    if HAS_BIAS:
        if FLOAT64:
            dbias_sum += single(cotangent).to(tl.float64)
        else:
            dbias_sum, error = two_sum(dbias_sum, single(cotangent))
            dbias_error += error
    tl.store(dx + offsets, result, mask=inside)
    is_inexact = _is_inexact(margin, v, step, FORMAT, ROWS, BLOCK)
    first, last = tl.where(is_inexact, tl.minimum(first, tile), first), tl.where(is_inexact, tile, last)
    return dscale_sum, dscale_error, dbias_sum, dbias_error, first, last, has_special | special.to(tl.int32)


@triton.jit
def backward(
    h, dy, dh, scale, mask, parts, inverse_rms, dx, dscale, dbias, rows, n, k, groups, h_step, mask_step, mask_stride,
    PROGRAMS, CHUNKS, eps: tl.float64, share: tl.float64, POSITION: tl.constexpr, OFFSET: tl.constexpr,
    FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    FLOAT64: tl.constexpr,
):  # fmt: skip
    """Tiles i, i + PROGRAMS ... of a group of dx, and the sums over these rows in float64, for dscale and dbias.

    Those are PROGRAMS by n times the number of groups. ``parts``: what sum_parts has written, if rows are split; a
    tile then is a chunk of one row. The loop over tiles has no branch, so that the compiler reads ahead. Tiles in
    which some element was not exact are computed again behind it, and the sums, if a row was special.
    """
    program, group, count = group_of_program(groups)
    chunk = tl.program_id(1)
    if scale is not None:
        scale += group * n
    columns = chunk * BLOCK + tl.arange(0, BLOCK)[None, :]
    first = tl.full((ROWS, BLOCK // (4 if FORMAT == "float32" else 8), 1), 2**31 - 1, tl.int32)
    last, has_special = tl.zeros(first.shape, tl.int32) - 1, tl.zeros((ROWS, 1), tl.int32)
    gain, gain_error = tl.full(columns.shape, 2.0**-896, tl.float64), None
    if not FLOAT64:
        gain, rest = _gains_in_pairs(scale, columns, n, OFFSET)
        if scale is not None:  # noqa: SIM102  (the compiler would read the dtype of None)
            if OFFSET != 0 or scale.dtype.element_ty == tl.float32 or dy.dtype.element_ty == tl.float32:
                gain_error = rest  # else u is exact
    elif scale is not None:
        own = tl.load(scale + columns, mask=columns < n, other=0.0)
        gain = lowered(own) + OFFSET * 2.0**-896
        is_finite = tl.abs(single(own)) < float("inf")  # which ``lowered`` asks
        has_special += 1 - tl.min(is_finite.to(tl.int32))
    HAS_COUNTS: tl.constexpr = mask is not None or k is not None
    dscale_sum = tl.zeros((ROWS, BLOCK), tl.float64 if FLOAT64 else tl.float32)
    dscale_error = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias_sum, dbias_error = dscale_sum, dscale_error
    tiles = tl.cdiv(rows, ROWS)
    for tile in tl.range(program, tiles, PROGRAMS, num_stages=STAGES):
        v, cotangent, r, alive, live, counts, size, part, index = _read(
            h, dy, mask, parts, inverse_rms, rows, n, k, groups, tile, group, count, columns, h_step, mask_step,
            mask_stride, CHUNKS, share, ROWS, BLOCK,
        )  # fmt: skip
        inner_error = None
        if parts is not None:
            inner = sum_of_parts(parts, index, CHUNKS, BLOCK)
            if not FLOAT64:
                inner, inner_error = split(inner)
        elif FLOAT64:
            inner = tl.sum(_product(v, cotangent, gain, False), 1)[:, None] * 2.0**896
        else:
            inner, inner_error = _inner_in_pairs(v, cotangent, gain, gain_error, 1)
            inner, inner_error = inner[:, None], inner_error[:, None]
        dscale_sum, dscale_error, dbias_sum, dbias_error, first, last, has_special = _finish(
            v, cotangent, gain, gain_error, inner, inner_error, r, alive, live, counts, size, share, part, index, dh,
            dx, dscale_sum, dscale_error, dbias_sum, dbias_error, first, last, has_special, tile, rows, count, n,
            columns, eps, mask, POSITION, HAS_COUNTS, dscale is not None, dbias is not None, FORMAT, ROWS, BLOCK,
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
            v, cotangent, r, alive, live, counts, size, part, index = _read(
                h, dy, mask, parts, inverse_rms, rows, n, k, groups, tile, group, count, columns, h_step, mask_step,
                mask_stride, CHUNKS, share, ROWS, BLOCK,
            )  # fmt: skip
            if parts is None:
                inner = tl.sum(_product(v, cotangent, wide_gain, True), 1)[:, None]
            else:
                inner = sum_of_parts(parts, index, CHUNKS, BLOCK)
            step, special = _step(inner, r, alive, size, part, eps, POSITION, FLOAT64)
            _, total, margin = _gradient(
                v, cotangent, wide_gain, step, r, None, dscale_sum, counts, HAS_COUNTS, FORMAT, True, FLOAT64
            )
            dscale_sum = tl.where(live & again, total, dscale_sum)
            is_inexact = _is_inexact(margin, v, step, FORMAT, ROWS, BLOCK)
            if (tl.max(is_inexact.to(tl.int32)) > 0) | (tl.max(special.to(tl.int32)) > 0):
                tl.debug_barrier()
                row = tile * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
                _recompute(
                    h, dy, dh, scale, mask, dx, row * h_step + group * n, index * n, index * mask_step, mask_stride,
                    row < rows, alive, chunk * BLOCK, tl.minimum(n, (chunk + 1) * BLOCK), n, k, r, size, eps, POSITION,
                    OFFSET, FORMAT, ROWS,
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
