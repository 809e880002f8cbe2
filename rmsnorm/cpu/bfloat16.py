"""bfloat16 rows in float32 arithmetic, which is several times as fast, with the bits of float64 arithmetic.

The sums are in float64 before. What is left has so few roundings that their errors are bounded by a few 2^-24 of the
terms: where both ends of that interval round to one bfloat16, so does the exact result. An element where they do not,
one in some thousands, or one beyond the range, is marked in ``doubt``, for the caller to compute in float64. Factors
1 / rho and share are to be within 2^20 of 1, gains 2^-40 to 2^16: what underflows on the way is then seen in no result.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from rmsnorm.cpu.formats import bits, widen

# 1 / rho, the gain and two products, each half a unit in the last place, which doubles where the next power of two is
_FORWARD: Final = 5
# of 2^-24 of the terms: a / rho and its factor, three products and a difference, 1 / rho, the ends of the interval
_BACKWARD: Final = np.float32(12 * 2.0**-24)


def forward_row(a: Any, gain: Any, reciprocal: Any, out: Any, doubt: Any) -> None:
    """a / rho * gain, of bfloat16 to bfloat16."""


def forward_row_before(a: Any, gain: Any, reciprocal: Any, out: Any, doubt: Any) -> None:
    """Likewise, with a / rho rounded to bfloat16 first; also to float32."""


def backward_row(a: Any, v: Any, gain: Any, reciprocal: Any, share: Any, out: Any, doubt: Any) -> None:
    """(v gain - a / rho share) / rho, of bfloat16 to bfloat16."""


@overload(forward_row, strict=False)
def _forward_row(a: Any, gain: Any, reciprocal: Any, out: Any, doubt: Any) -> Any:
    if a.dtype != types.uint16 or out.dtype != types.uint16:
        return lambda a, gain, reciprocal, out, doubt: None

    def compute(a: Any, gain: Any, reciprocal: Any, out: Any, doubt: Any) -> None:
        for j in range(a.size):
            y = (bits(widen(a[j])) * reciprocal) * gain[j]
            out[j] = _narrow(y)
            doubt[j] = _is_near_tie(y) | _is_far_out(y)

    return compute


@overload(forward_row_before, strict=False)
def _forward_row_before(a: Any, gain: Any, reciprocal: Any, out: Any, doubt: Any) -> Any:
    if a.dtype != types.uint16 or out.dtype not in (types.uint16, types.float32):
        return lambda a, gain, reciprocal, out, doubt: None
    is_half = out.dtype == types.uint16

    def compute(a: Any, gain: Any, reciprocal: Any, out: Any, doubt: Any) -> None:
        for j in range(a.size):
            normalised = bits(widen(a[j])) * reciprocal
            y = bits(widen(_narrow(normalised))) * gain[j]  # exact, or rounded as the variant says
            out[j] = _narrow(y) if is_half else y
            doubt[j] = _is_near_tie(normalised) | _is_far_out(normalised) | _is_far_out(y)

    return compute


@overload(backward_row, strict=False)
def _backward_row(a: Any, v: Any, gain: Any, reciprocal: Any, share: Any, out: Any, doubt: Any) -> Any:
    if a.dtype != types.uint16 or v.dtype != types.uint16:
        return lambda a, v, gain, reciprocal, share, out, doubt: None

    def compute(a: Any, v: Any, gain: Any, reciprocal: Any, share: Any, out: Any, doubt: Any) -> None:
        for j in range(a.size):
            first = bits(widen(v[j])) * gain[j]
            second = (bits(widen(a[j])) * reciprocal) * share
            found = reciprocal * (first - second)
            size = reciprocal * (abs(first) + abs(second))
            out[j] = _narrow(found)
            doubt[j] = _is_split(found, size * _BACKWARD) | _is_far_out(size) | (size == 0)

    return compute


# In 32-bit words, which numba's own operators would make 64 bits wide: half as many fit in a register.
_WORD: Final = ir.IntType(32)


@intrinsic
def _narrow(_: Any, single: Any) -> Any:
    """To nearest even, of a finite number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.bitcast(args[0], _WORD)
        odd = builder.and_(builder.lshr(word, ir.Constant(_WORD, 16)), ir.Constant(_WORD, 1))
        up = builder.add(builder.add(word, ir.Constant(_WORD, 0x7FFF)), odd)
        return builder.trunc(builder.lshr(up, ir.Constant(_WORD, 16)), ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic
def _is_near_tie(_: Any, single: Any) -> Any:
    """Whether what is cut off is within a few units of one half."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rest = builder.and_(builder.bitcast(args[0], _WORD), ir.Constant(_WORD, 0xFFFF))
        above = builder.sub(rest, ir.Constant(_WORD, 0x8000 - _FORWARD))
        return builder.icmp_unsigned("<=", above, ir.Constant(_WORD, 2 * _FORWARD))

    return types.boolean(types.float32), generate


@intrinsic
def _is_split(_: Any, middle: Any, error: Any) -> Any:
    """Whether the two ends of an interval round to different numbers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ends = []
        for operation in (builder.fadd, builder.fsub):
            word = builder.bitcast(operation(*args), _WORD)
            ends.append(builder.lshr(builder.add(word, ir.Constant(_WORD, 0x8000)), ir.Constant(_WORD, 16)))
        return builder.icmp_unsigned("!=", *ends)

    return types.boolean(types.float32, types.float32), generate


@intrinsic
def _is_far_out(_: Any, single: Any) -> Any:
    """Whether a number is not finite, or is outside 2^-80 to 2^80 and not 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        magnitude = builder.and_(builder.bitcast(args[0], _WORD), ir.Constant(_WORD, 0x7FFFFFFF))
        large = builder.icmp_unsigned(">", magnitude, ir.Constant(_WORD, (127 + 80) << 23))
        below = builder.sub(magnitude, ir.Constant(_WORD, 1))  # of 0 the largest
        small = builder.icmp_unsigned("<", below, ir.Constant(_WORD, (127 - 80) << 23))
        return builder.or_(large, small)

    return types.boolean(types.float32), generate
