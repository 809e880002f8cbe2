"""Quotients of 16 bits in Triton, cut off to float32 and made odd: then one more rounding is that of the quotient.

Two roundings to nearest can differ from one, where the first lands on a tie, the middle between two numbers of 16
bits. *Rounding to odd* prevents this (Boldo & Melquiond 2008): a number that float32 does not have becomes the one of
its two neighbours whose last bit is 1, so that the second rounding sees on which side of the tie it is. Of a number
that is cut off towards 0 this sets the last bit. GPUs cut off at no cost (``fma.rz``, ``cvt.rz``).

p = h gain has at most 24 bits, so float32 has it. With 1 / rho = high + low, both cut off (the pair is below 1 / rho
by less than 2^-46 of it),

    t = cut off (p high + cut off (p low)),   y = round (t with its last bit set)

- t is the quotient cut off, if the quotient is not within 2^-45 of a number of 24 bits. No tie is that near unless it
  is exact: a tie times rho has few bits, and 1 / rho is irrational, or rational.
- An exact tie needs a rational rho. A row whose rho or 1 / rho has at most 24 bits, as rows of equal numbers with eps
  = 0, is computed again (``triton_forward``).
- Range, in bfloat16: the gain is multiplied by 2^32 and 1 / rho by 2^16, and t is divided by 2^48, again cut off, so
  that nothing that reaches y is subnormal on the way. For LLaMA's rounding 1 / rho is multiplied by 2^96. This asks
  2^-20 <= rho <= 2^20 and |gain| < 2^40. A row beyond that, and each NaN, is computed again: a gain that is too large
  makes a square NaN, and every test ends in the sum of the row.
- A gain with an offset, or of float32: the product o + w, its product with 1 / rho, and that with h are float64, each
  cut off, then t as above. A bias, or a result of another format: pairs of float32, rounded once, with a test of each
  element.
"""

from typing import Final

import triton
import triton.language as tl

from rmsnorm.gpu.triton_pairs import (
    INTERPRETED,
    cut,
    lowered,
    multiply_off,
    single,
    split_off,
    to_format,
    two_sum,
)

MOST_GAIN: Final = tl.constexpr(2.0**40)
# Two elements of 16 bits, packed as in memory, in the steps of `by_cutting`, which the interpreter takes;
# tests/nightly/assembly.py compares both. Operands: result, h, gain, high and low of 1 / rho, each for two elements.
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


@triton.jit
def guarded(h, gain, FORMAT: tl.constexpr):
    """h in float32; NaN where the gain is not finite or, in bfloat16, not below MOST_GAIN."""
    if INTERPRETED:
        factor = 2.0**88 if FORMAT == "bfloat16" else 1.0
        return tl.where(tl.abs(to_format(single(gain) * factor, FORMAT)) < float("inf"), single(h), float("nan"))
    elif FORMAT == "bfloat16":
        return single(tl.inline_asm_elementwise(GUARDED_BFLOAT16, "=r,r,r", [h, gain], tl.bfloat16, True, 2))
    else:
        return single(tl.inline_asm_elementwise(GUARDED_FLOAT16, "=r,r,r", [h, gain], tl.float16, True, 2))


@triton.jit
def by_cutting(h, gain, inverse, FORMAT: tl.constexpr, IS_NORMED: tl.constexpr, low=None):
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
def by_cutting_wide(h, gain, inverse, OFFSET: tl.constexpr, FORMAT: tl.constexpr):
    """As by_cutting, with o + the gain, or a gain of float32: the product and the quotient are float64, cut off."""
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
