"""dx of a tile in Triton, before it is stored: in float64 or, where that is slow, in pairs of float32.

    dx = u / rho - h B,    B = <u, h> / (k s rho^2),    u = (o + scale) dy

- <u, h> is a sum in float64. For 16 bits h dy is a product in float32, exact or, below 2^-133, lost; a row counts as
  out of range if |B| is not 0 and below 2^-60, and then what is lost does not matter.
- h and the gain become float64 by moving their bits, not by a conversion, of which a GPU makes a quarter as many.
  This makes them 2^-896 times as large, and 1 / rho and B are multiplied by 2^896. An infinite number would become a
  finite one: <u, h> is then not finite, or the gain is tested once, and the row is out of range.
- dx is one fused product and sum, its error is 2^-52 of its terms; it is cut off to float32 and made odd. If |dx| is
  below 2^-26 |h B|, or in float32 if four neighbours are all below 2^-12 |h B|, too few bits are left: the tile is
  noted.
- In pairs of float32, a gradient of less than 2^-19 of its terms is computed again; that is float64 here, too.

What may still differ from the exact result: dx within 2^-45 of a tie of 16 bits, or where a row is rational and <u,
h> is exactly 0; the sign of a gradient below 2^-150; one dx of float32 in about 50,000 of hostile rows, by one ulp.
Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

import triton
import triton.language as tl

from rmsnorm.gpu.triton_pairs import (
    INTERPRETED,
    LEAST_RHO,
    MOST,
    MOST_RHO,
    add_pairs,
    cut,
    divide_pairs,
    gains,
    lowered,
    multiply_pairs,
    rounded,
    rounded_near,
    single,
    split_argument,
    sum_of_pairs,
    to_format,
    two_sum,
)

CANCELS: tl.constexpr = tl.constexpr(2.0**-26)  # of h B, what dx must have at least: 53 bits leave it 26
CANCELS_TOGETHER: tl.constexpr = tl.constexpr(2.0**-12)  # the same of neighbours in float32
CANCELS_IN_PAIRS: tl.constexpr = tl.constexpr(2.0**-19)  # of h B, where pairs of float32 are subtracted
LEAST_SIZE: tl.constexpr = tl.constexpr(2.0**-80)  # of inner products and results in pairs of float32, and the most
MOST_SIZE: tl.constexpr = tl.constexpr(2.0**80)
LEAST_STEP: tl.constexpr = tl.constexpr(2.0**-60)  # of B: below it products that float32 loses would count


def _steps(name: str, has_sum: bool) -> str:
    """The steps of ``gradient_of`` for an element of 32 bits or two of 16, one after the other: for few registers.

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
def anew(tensor):
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
def _negative(number):
    """A float32 times -1 in float64: not what follows needs, lest the compiler keep 32 more registers of it."""
    if INTERPRETED:
        return -number.to(tl.float64)
    else:
        text: tl.constexpr = "{ .reg .b32 s; neg.f32 s, $1; cvt.f64.f32 $0, s; }"
        return tl.inline_asm_elementwise(text, "=d,r", [number], tl.float64, True, 1)


@triton.jit
def product_of(v, cotangent, gain, SAFE: tl.constexpr):
    """u h; of 16 bits and unless SAFE, h dy is a float32, which has it or is not finite, or is too small to count."""
    if SAFE or v.dtype == tl.float32 or cotangent.dtype == tl.float32:
        return single(v).to(tl.float64) * _negative(single(cotangent)) * -gain
    else:
        return (single(v) * single(cotangent)).to(tl.float64) * gain


@triton.jit
def gains_in_pairs(scale, columns, n, OFFSET: tl.constexpr):
    """o + scale as a pair of float32."""
    if scale is None:
        return tl.full(columns.shape, 1.0, tl.float32), tl.zeros(columns.shape, tl.float32)
    else:
        return gains(scale, columns, columns < n, OFFSET)


@triton.jit
def inner_in_pairs(v, cotangent, gain, gain_error, AXIS: tl.constexpr):
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
def step_of(inner, r, alive, size, part, eps, POSITION: tl.constexpr, FLOAT64: tl.constexpr):
    """B of dx = u / rho - h B, and in which rows dx must be computed in another way; unless FLOAT64, in more."""
    special = ((r >= 1 / MOST_RHO) & (r <= 1 / LEAST_RHO)) == 0
    step = inner * (r * r * r * part)
    if POSITION == "outside":
        step *= 1 / (1 - eps * r)
        special = special | (eps * r > 0.5)
    elif POSITION == "clamp":  # pairs say on which side of it a row is
        special = special | ((inner != 0) & (r * (eps / tl.sqrt(size)) > 1 - 2.0**-18))
    special = special | ((step != 0) & (((tl.abs(step) >= LEAST_STEP) & (tl.abs(step) <= MOST)) == 0))
    if not FLOAT64:
        special = special | ((inner != 0) & ((tl.abs(inner) <= 2 * LEAST_SIZE) | (tl.abs(inner) >= MOST_SIZE / 2)))
    return step, special & alive


@triton.jit
def step_in_pairs(inner, inner_error, r, r_error, part, part_error, alive, size, eps, POSITION: tl.constexpr):
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
def gradient_of(
    v, cotangent, gain, step, r, other, dscale_sum, FORMAT: tl.constexpr, SAFE: tl.constexpr,
    FLOAT64: tl.constexpr = True,
):  # fmt: skip
    """dx + other, the sums for the gain, and numbers that are negative where dx is inexact.

    Unless SAFE, h and the gain are 2^-896 times as large, and what they are multiplied by 2^896 times.
    """
    LIFT: tl.constexpr = 1.0 if SAFE else 2.0**896
    if INTERPRETED or SAFE or cotangent.dtype != v.dtype:
        wide = single(v).to(tl.float64) if SAFE else lowered(v)
        near = wide * (step * -LIFT)
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
def gradient_in_pairs(
    v, cotangent, gain, gain_error, step, step_error, r, r_error, other, sums, sums_error, FORMAT: tl.constexpr,
):  # fmt: skip
    """The same of pairs of float32."""
    h, y = single(v), single(cotangent)
    u, product = y * gain, h * y
    far = u * r
    far_error = tl.fma(u, r_error, tl.fma(u, r, -far))
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
def are_inexact(margin, v, step, FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Whether dx is inexact in what a thread reads at once: an element that cancels or, of 32 bits, all that cancel.

    In a row whose gradient cancels, as that of (norm(x)**2).sum(), float64 leaves float32 too little of each element.
    """
    SHAPE: tl.constexpr = (ROWS, BLOCK // 4, 4) if FORMAT == "float32" else (ROWS, BLOCK // 8, 8)
    is_inexact = tl.min(tl.reshape(margin, SHAPE), 2, keep_dims=True) < 0
    if FORMAT == "float32":
        margin -= tl.abs(single(v) * (step * CANCELS_TOGETHER).to(tl.float32))
        is_inexact = is_inexact | (tl.max(tl.reshape(margin, SHAPE), 2, keep_dims=True) < 0)
    return is_inexact
