"""bfloat16 rows in float32 arithmetic, which is several times as fast, with the bits of float64 arithmetic.

The sums were computed in float64 before. What is left has so few roundings that their errors are bounded by a few 2^-24
of the terms: if both ends of that interval round to the same bfloat16, so does the exact result. If they do not, which
happens to one element in some thousands, or if an element is out of range, it is marked in ``doubt``, and the caller
computes it in float64. 1 / rho and share must be between 2^-20 and 2^20, the size of a gain between 2^-40 and 2^16, or
0: then no result shows that a product underflowed on the way. An h must be below 2^60, unless rho bounds it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rmsnorm.cpu import target
from rmsnorm.cpu.formats import bits, inlined, widen

# Roundings of 1 / rho, the gain and two products: each is half a unit in the last place, or one beside a power of two.
_FORWARD: Final = 5
# In 2^-24 of the terms: h / rho and its factor, three products and a difference, 1 / rho, the ends of the interval.
_BACKWARD: Final = np.float32(12 * 2.0**-24)


@inlined
def forward_row(h: Any, gain: Any, inverse_rms: Any, y: Any, doubt: Any) -> None:
    """y = h / rho * gain, from bfloat16 to bfloat16."""
    for j in range(h.size):
        result = (bits(widen(h[j])) * inverse_rms) * gain[j]
        y[j] = narrow(result)
        doubt[j] = _is_near_tie(result) | _is_tiny(result)


@inlined
def forward_row_before(narrow_y: Any, h: Any, gain: Any, inverse_rms: Any, y: Any, doubt: Any) -> None:
    """Likewise, with h / rho rounded to bfloat16 first; ``narrow_y`` makes y of the product, which may be float32."""
    for j in range(h.size):
        normalised = bits(widen(h[j])) * inverse_rms
        result = bits(widen(narrow(normalised))) * gain[j]  # exact, or rounded as the variant says
        y[j] = narrow_y(result)
        doubt[j] = _is_near_tie(normalised) | _is_tiny(normalised) | _is_tiny(result)


@inlined
def backward_row(h: Any, dy: Any, gain: Any, inverse_rms: Any, share: Any, dx: Any, doubt: Any) -> None:
    """dx = (dy gain - h / rho share) / rho, from bfloat16 to bfloat16."""
    for j in range(h.size):
        first = bits(widen(dy[j])) * gain[j]
        second = (bits(widen(h[j])) * inverse_rms) * share
        gradient = inverse_rms * (first - second)
        size = inverse_rms * (abs(first) + abs(second))
        dx[j] = narrow(gradient)
        doubt[j] = _is_split(gradient, size * _BACKWARD) | _is_far_out(size)


@inlined
def is_moderate(gain: Any) -> Any:
    """Whether a product with any of these gains underflows only where the result is next to nothing, too."""
    moderate = True
    for j in range(gain.size):  # a loop by index is vectorised
        size = abs(gain[j])
        moderate &= (size == 0) | ((size > 2.0**-40) & (size < 2.0**16))
    return moderate


@inlined
def is_small(h: Any, first: int) -> Any:
    """Whether the elements from ``first`` on are finite and below 2^60."""
    small = True
    for j in range(first, h.size):
        small &= abs(bits(widen(h[j]))) < np.float32(2.0**60)
    return small


@inlined
def any_set(marks: Any) -> Any:
    union = np.uint64(0)
    for j in range(marks.size):
        union |= marks[j]
    return union != 0


@inlined
def as_it_is(single: Any) -> Any:
    return single


# These work on 32-bit words. numba's own operators would make them 64 bits wide, and half as many fit in a register.
_WORD: Final = ir.IntType(32)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"


@intrinsic
def _narrow(_: Any, single: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], _BFloat()), ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic
def narrow_in_software(_: Any, single: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.bitcast(args[0], _WORD)
        odd = builder.and_(builder.lshr(word, ir.Constant(_WORD, 16)), ir.Constant(_WORD, 1))
        up = builder.add(builder.add(word, ir.Constant(_WORD, 0x7FFF)), odd)
        return builder.trunc(builder.lshr(up, ir.Constant(_WORD, 16)), ir.IntType(16))

    return types.uint16(types.float32), generate


# The bits of the nearest bfloat16, to even, of a finite float32 that is 0 or above 2^-126.
narrow: Final = _narrow if target.has("avx512bf16") else narrow_in_software


@intrinsic
def _is_near_tie(_: Any, single: Any) -> Any:
    """Whether the part that rounding cuts off is within a few units of one half."""

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
def _is_tiny(_: Any, single: Any) -> Any:
    """Whether a number is below 2^-80 and not 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        magnitude = builder.and_(builder.bitcast(args[0], _WORD), ir.Constant(_WORD, 0x7FFFFFFF))
        below = builder.sub(magnitude, ir.Constant(_WORD, 1))  # 0 becomes the largest number
        return builder.icmp_unsigned("<", below, ir.Constant(_WORD, (127 - 80) << 23))

    return types.boolean(types.float32), generate


@inlined
def _is_far_out(size: Any) -> Any:
    """Whether a size is not between 2^-80 and 2^80: 0, infinite or NaN, too."""
    return not (np.float32(2.0**-80) < size < np.float32(2.0**80))
