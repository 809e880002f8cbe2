"""The forward pass in Triton.

    y = h / rho * (o + scale) + bias,    h = x + residual

A kernel goes one of three ways, which WAY names (docs/gpu-arithmetic.md derives the bounds):

    cut      x, gain and y of one format of 16 bits: a quotient is cut off, and its last bit set
    wide     x of 32 bits: float64
    pairs    all else: pairs of float32, rounded once wherever the variant rounds

Unless FLOAT64, the sum and 1 / rho of x of 16 bits are pairs of float32, too: for cards on which float64 is slow.

A row that a way cannot compute is computed again in float64, in steps.
Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

from typing import Final

import triton
import triton.language as tl

from rmsnorm.gpu.triton_pairs import (
    INTERPRETED,
    LEAST_RESULT,
    LEAST_RHO,
    MOST,
    MOST_RHO,
    STEP,
    cut,
    divide_pairs,
    gains,
    group_of_program,
    inverse_rho,
    inverse_rho_in_pairs,
    is_counted,
    is_in_statistic,
    is_outside,
    lowered,
    multiply_off,
    over_rho,
    rho_of,
    rounded,
    rounded_near,
    rounded_wide,
    single,
    split,
    split_argument,
    split_off,
    sum_of_pairs,
    sum_of_parts,
    to_format,
    two_sum,
    wide_gains,
)

# Two elements of 16 bits, packed as in memory, in the steps of `_by_cutting`, which the interpreter takes;
# tests/gpu/assembly.py compares both. Operands: result, h, gain, high and low of 1 / rho, each for two elements.
_REGISTERS: Final = "{ .reg .b32 h0, h1, g0, g1, c0, c1, s, k, z; .reg .b16 a, b; mov.b32 z, 0x80008000; "
_BFLOAT16: Final = "shl.b32 h0, $1, 16; and.b32 h1, $1, 0xffff0000; "
_FLOAT16: Final = "mov.b32 {a, b}, $1; cvt.f32.f16 h0, a; cvt.f32.f16 h1, b; "
_TIMES_GAIN: Final = "mul.rn.f32 h0, h0, g0; mul.rn.f32 h1, h1, g1; "
_QUOTIENT: Final = (
    "mul.rz.f32 c0, h0, $5; mul.rz.f32 c1, h1, $6; fma.rz.f32 h0, h0, $3, c0; fma.rz.f32 h1, h1, $4, c1; "
)
_ODD: Final = "or.b32 h0, h0, 1; or.b32 h1, h1, 1; "
SCALED_BFLOAT16: Final = tl.constexpr(  # the gain times 2^32, 1 / rho times 2^16
    _REGISTERS + "mov.b32 k, 0x4f804f80; fma.rn.bf16x2 s, $2, k, z; " + _BFLOAT16
    + "shl.b32 g0, s, 16; and.b32 g1, s, 0xffff0000; " + _TIMES_GAIN + _QUOTIENT
    + "mul.rz.f32 h0, h0, 0f27800000; mul.rz.f32 h1, h1, 0f27800000; " + _ODD + "cvt.rn.bf16x2.f32 $0, h1, h0; }"
)  # fmt: skip
SCALED_FLOAT16: Final = tl.constexpr(
    _REGISTERS + _FLOAT16 + "mov.b32 {a, b}, $2; cvt.f32.f16 g0, a; cvt.f32.f16 g1, b; " + _TIMES_GAIN + _QUOTIENT
    + _ODD + "cvt.rn.f16x2.f32 $0, h1, h0; }"
)  # fmt: skip


def _wide_steps(unpack: str, gain: str, pack: str) -> str:
    """With o + the gain, or a gain of float32, in float64. Operands: result, h, gain (two of 32 bits), o, 1 / rho."""
    text = "{ .reg .b32 h0, h1, g0, g1, e, z; .reg .b16 a, b; .reg .b64 w, g; mov.b32 z, 0; " + unpack + gain
    last = 4 if "$3" in gain else 3
    for i in (0, 1):
        text += f"shr.s32 e, h{i}, 3; and.b32 e, e, 0x8fffffff; mov.b64 w, {{z, e}}; cvt.f64.f32 g, g{i}; "
        text += f"add.rn.f64 g, g, ${last + i}; mul.rz.f64 g, g, ${last + 2 + i}; mul.rz.f64 w, w, g; "
        text += f"cvt.rz.f32.f64 h{i}, w; or.b32 h{i}, h{i}, 1; "
    return text + pack


_ENDS: Final = "cvt.rn.bf16x2.f32 $0, h1, h0; }", "cvt.rn.f16x2.f32 $0, h1, h0; }"
_GAINS: Final = (
    "shl.b32 g0, $2, 16; and.b32 g1, $2, 0xffff0000; ",
    "mov.b32 {a, b}, $2; cvt.f32.f16 g0, a; cvt.f32.f16 g1, b; ",
)
WIDE_BFLOAT16: Final = tl.constexpr(_wide_steps(_BFLOAT16, _GAINS[0], _ENDS[0]))
WIDE_FLOAT16: Final = tl.constexpr(_wide_steps(_FLOAT16, _GAINS[1], _ENDS[1]))
WIDE_BFLOAT16_32: Final = tl.constexpr(_wide_steps(_BFLOAT16, "mov.b32 g0, $2; mov.b32 g1, $3; ", _ENDS[0]))
WIDE_FLOAT16_32: Final = tl.constexpr(_wide_steps(_FLOAT16, "mov.b32 g0, $2; mov.b32 g1, $3; ", _ENDS[1]))
NORMED_BFLOAT16: Final = tl.constexpr(  # 1 / rho times 2^96
    _REGISTERS + _BFLOAT16 + _QUOTIENT + "mul.rz.f32 h0, h0, 0f0f800000; mul.rz.f32 h1, h1, 0f0f800000; " + _ODD
    + "cvt.rn.bf16x2.f32 s, h1, h0; fma.rn.bf16x2 $0, s, $2, z; }"
)  # fmt: skip
NORMED_FLOAT16: Final = tl.constexpr(
    _REGISTERS + _FLOAT16 + _QUOTIENT + _ODD + "cvt.rn.f16x2.f32 s, h1, h0; fma.rn.f16x2 $0, s, $2, z; }"
)
GUARDED_BFLOAT16: Final = tl.constexpr(  # 2^88 |gain| is infinite from 2^40 on, and 0 times that NaN
    _REGISTERS + "mov.b32 k, 0x6b806b80; fma.rn.bf16x2 s, $2, k, z; mov.b32 k, 0; fma.rn.bf16x2 $0, s, k, $1; }"
)
GUARDED_FLOAT16: Final = tl.constexpr(_REGISTERS + "mov.b32 k, 0; fma.rn.f16x2 $0, $2, k, $1; }")
MOST_GAIN: Final = tl.constexpr(2.0**40)
LEAST_WIDE: Final = tl.constexpr(2.0**-500)  # of 1 / rho in float64
MOST_WIDE: Final = tl.constexpr(2.0**500)


@triton.jit
def _guarded(h, gain, FORMAT: tl.constexpr):
    """h in float32; NaN where the gain is not finite or, in bfloat16, not below MOST_GAIN."""
    if INTERPRETED:
        factor = 2.0**88 if FORMAT == "bfloat16" else 1.0
        return tl.where(tl.abs(to_format(single(gain) * factor, FORMAT)) < float("inf"), single(h), float("nan"))
    elif FORMAT == "bfloat16":
        return single(tl.inline_asm_elementwise(GUARDED_BFLOAT16, "=r,r,r", [h, gain], tl.bfloat16, True, 2))
    else:
        return single(tl.inline_asm_elementwise(GUARDED_FLOAT16, "=r,r,r", [h, gain], tl.float16, True, 2))


@triton.jit
def _by_cutting(h, gain, inverse, FORMAT: tl.constexpr, IS_NORMED: tl.constexpr, low=None):
    """h gain / rho rounded once or, if IS_NORMED, h / rho rounded and its product with the gain: all in one format.

    A quotient that 24 bits do not have is cut off and its last bit set, which rounds it to odd; so the rounding that
    follows is that of the quotient. Multiplied by powers of two, bfloat16 stays out of float32's subnormal numbers.
    low: what is behind ``inverse``, if that is a float32.
    """
    IS_BFLOAT16: tl.constexpr = FORMAT == "bfloat16"
    LIFT: tl.constexpr = 1.0 if not IS_BFLOAT16 else 2.0**96 if IS_NORMED else 2.0**16
    if low is None:
        high, low = split_off(inverse * LIFT)
    else:
        high, low = inverse * LIFT, low * LIFT
    if INTERPRETED:
        product = single(h)
        if not IS_NORMED:
            product *= single(gain) * (2.0**32 if IS_BFLOAT16 else 1.0)
        small = cut(product.to(tl.float64) * low.to(tl.float64), 0.0)
        total, rest = two_sum(product.to(tl.float64) * high.to(tl.float64), small.to(tl.float64))
        quotient = cut(total, rest)
        if IS_BFLOAT16:
            quotient = cut(quotient.to(tl.float64) * (2.0**-96 if IS_NORMED else 2.0**-48), 0.0)
        quotient = (quotient.to(tl.int32, bitcast=True) | 1).to(tl.float32, bitcast=True)
        result = to_format(quotient, FORMAT)
        if IS_NORMED:
            result = to_format(single(result) * single(gain), FORMAT)  # which float32 has
        return result
    else:
        OF_BFLOAT16: tl.constexpr = NORMED_BFLOAT16 if IS_NORMED else SCALED_BFLOAT16
        OF_FLOAT16: tl.constexpr = NORMED_FLOAT16 if IS_NORMED else SCALED_FLOAT16
        STEPS: tl.constexpr = OF_BFLOAT16 if IS_BFLOAT16 else OF_FLOAT16
        return tl.inline_asm_elementwise(STEPS, "=r,r,r,r,r,r,r", [h, gain, high, low], h.dtype, True, 2)


@triton.jit
def _by_cutting_wide(h, gain, inverse, OFFSET: tl.constexpr, FORMAT: tl.constexpr):
    """As _by_cutting, with o + the gain, or a gain of float32: the product and the quotient are float64, cut off."""
    offset, lifted = tl.full(inverse.shape, OFFSET, tl.float64), inverse * 2.0**896
    if INTERPRETED:
        factor = multiply_off(single(gain).to(tl.float64) + offset, lifted)
        quotient = cut(multiply_off(lowered(h), factor), 0.0)
        return to_format((quotient.to(tl.int32, bitcast=True) | 1).to(tl.float32, bitcast=True), FORMAT)
    else:
        IS_SINGLE: tl.constexpr = gain.dtype == tl.float32
        OF_BFLOAT16: tl.constexpr = WIDE_BFLOAT16_32 if IS_SINGLE else WIDE_BFLOAT16
        OF_FLOAT16: tl.constexpr = WIDE_FLOAT16_32 if IS_SINGLE else WIDE_FLOAT16
        STEPS: tl.constexpr = OF_BFLOAT16 if FORMAT == "bfloat16" else OF_FLOAT16
        SLOTS: tl.constexpr = "=r,r,r,r,d,d,d,d" if IS_SINGLE else "=r,r,r,d,d,d,d"
        return tl.inline_asm_elementwise(STEPS, SLOTS, [h, gain, offset, lifted], h.dtype, True, 2)


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
    x, residual, mask, parts, n, k, groups, x_step, mask_step, mask_stride, CHUNKS,
    FORMAT: tl.constexpr, BLOCK: tl.constexpr, FLOAT64: tl.constexpr,
):  # fmt: skip
    """Into ``parts``, of rows by CHUNKS: the squares in a chunk of a row; behind them, with a mask, how many count."""
    index, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, group, _ = group_of_program(groups)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    counts = is_counted(mask, index, columns, mask_step, mask_stride, is_in_statistic(columns, k, columns < n))
    here = row.to(tl.int64) * x_step + group * n + columns
    h = load_sum(x, residual, here, index * n + columns, counts, FORMAT)
    if FLOAT64:
        h = single(h).to(tl.float64)
        total = tl.sum(h * h, 0)
    else:
        near, error = sum_of_pairs(single(h) * single(h), None, 0)
        total = near.to(tl.float64) + error.to(tl.float64)
    tl.store(parts + index * CHUNKS + chunk, total)
    if mask is not None:
        size = tl.sum(counts.to(tl.int32), 0).to(tl.float64)
        tl.store(parts + (tl.num_programs(0) + index) * CHUNKS + chunk, size)


@triton.jit
def forward(
    x, residual, scale, bias, mask, parts, y, h_out, inverse_rms, rows, n, k, groups, x_step, mask_step, mask_stride,
    CHUNKS, eps: tl.float64, share: tl.float64, POSITION: tl.constexpr, OFFSET: tl.constexpr, FORMAT: tl.constexpr,
    NORM: tl.constexpr, PRODUCT: tl.constexpr, RESULT: tl.constexpr, WAY: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, FLOAT64: tl.constexpr,
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
    counts = is_in_statistic(columns, k, inside)
    if mask is not None:
        counts = is_counted(mask, index, columns, mask_step, mask_stride, counts)
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
                    v = _guarded(h, gain, FORMAT)
            if mask is not None or k is not None:  # rho is no bound of an element that does not count
                v = tl.where(tl.abs(v) < MOST_GAIN, tl.where(counts, v, 0.0), float("nan"))
            square = v * v  # exact, or too small to count
        else:
            v = single(h)
            if mask is not None or k is not None:  # else an element outside is 0
                v = tl.where(counts, v, 0.0)
            square = v.to(tl.float64) * v.to(tl.float64) if FLOAT64 else v * v
        if FLOAT64:
            total = tl.sum(square.to(tl.float64), 1)[:, None]
        else:
            near, error = sum_of_pairs(square, None, 1)
            near, error = near[:, None], error[:, None]
    else:
        total = sum_of_parts(parts, index, CHUNKS, BLOCK)
        near, error = split(total)
    alive, size = row < rows, tl.zeros((ROWS, 1), tl.float64) + (n if k is None else k)
    if mask is not None:
        if parts is None:
            size = tl.sum(counts.to(tl.int32), 1)[:, None].to(tl.float64)
        else:
            size = sum_of_parts(parts, rows * count + index, CHUNKS, BLOCK)
        alive &= size > 0
        size = tl.where(size > 0, size, 1.0)
    if FLOAT64:
        inverse, is_short = inverse_rho(total, share if mask is None else 1 / size, size, eps, POSITION)
    else:
        part, part_error = split_argument(share)
        if mask is not None:
            part, part_error = split(size)
            part, part_error = divide_pairs(1.0, 0.0, part, part_error)
        high, low, is_short = inverse_rho_in_pairs(near, error, part, part_error, eps, size, POSITION)
        inverse = (high.to(tl.float64) + low.to(tl.float64)).to(tl.int64, bitcast=True) | 1
        inverse = inverse.to(tl.float64, bitcast=True)
        special = is_short | (((high >= 1 / MOST_RHO) & (high <= 1 / LEAST_RHO)) == 0)
    if WAY == "wide":
        special = is_short | (((inverse >= LEAST_WIDE) & (inverse <= MOST_WIDE)) == 0)
    elif FLOAT64:
        special = is_short | (((inverse >= 1 / MOST_RHO) & (inverse <= 1 / LEAST_RHO)) == 0)
    if mask is not None:
        inverse = tl.where(alive, inverse, 0.0)
    if inverse_rms is not None and chunk == 0:
        tl.store(inverse_rms + index, inverse, mask=row < rows)

    if WAY == "cut":
        if scale is not None and (OFFSET != 0 or gain.dtype == tl.float32):
            result = _by_cutting_wide(h, gain, inverse, OFFSET, FORMAT)
        else:
            pair = (inverse, None) if FLOAT64 else (high, low)
            result = _by_cutting(h, gain, pair[0], FORMAT, NORM != "", pair[1])
    elif WAY == "wide":
        result = _in_float64(h, scale, bias, columns, columns < n, inverse, None, None, OFFSET, NORM, PRODUCT, RESULT)
    else:
        if FLOAT64:
            high, low = split(inverse)
        result, bad = _in_pairs(single(h), scale, bias, columns, columns < n, high, low, OFFSET, NORM, PRODUCT, RESULT)
        special = special | bad
    special = special & alive
    if mask is not None:
        result = tl.where(alive, result, tl.zeros(result.shape, result.dtype))
    tl.store(y + own_row + columns, result, mask=inside)
    if tl.max(special.to(tl.int32)) > 0:
        tl.debug_barrier()
        if parts is None or not FLOAT64:
            squares = tl.zeros((ROWS, STEP // ROWS), tl.float64)
            for start in range(0, n if k is None else k, STEP // ROWS):
                j = start + tl.arange(0, STEP // ROWS)[None, :]
                within = is_in_statistic(j, k, (row < rows) & (j < n))
                within = is_counted(mask, index, j, mask_step, mask_stride, within)
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
            if mask is not None:
                repaired = tl.where(alive, repaired, tl.zeros(repaired.shape, repaired.dtype))
            tl.store(y + own_row + j, repaired, mask=within)
