"""bfloat16 rows in float32 arithmetic, which is several times as fast, with the bits of float64 arithmetic.

The sums were computed in float64 before. What is left has so few roundings that their errors are bounded by a few 2^-24
of the terms: if both ends of that interval round to the same bfloat16, so does the exact result. If they do not, which
happens to one element in some thousands, or if an element is out of range, it is marked in ``doubt``, and the caller
computes it in float64. 1 / rho and share must be between 2^-20 and 2^20, the size of a gain between 2^-40 and 2^16, or
0: then no result shows that a product underflowed on the way. An element of h must be below 2^60; where all elements
are counted, rho is a bound for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rmsnorm.cpu import target
from rmsnorm.cpu.formats import STORE, apart, bits, inlined, widen
from rmsnorm.cpu.gate import Gate, load_single, single_of

# Roundings of 1 / rho, the gain and two products: each is half a unit in the last place, or one beside a power of two.
_FORWARD: Final = 5
# With a gate also h, which float64 has, or five units of f(z) (see gate.py) and its product; and some for what is left.
_GATED: Final = 16
_NORMAL: Final = np.float32(2.0**-126)
_LARGE: Final = np.float32(2.0**16)  # f(z): above, a product before it may have lost bits that its result shows
# In 2^-24 of the terms: h / rho and its factor, three products and a difference, 1 / rho, the ends of the interval.
_BACKWARD: Final = np.float32(12 * 2.0**-24)


def forward_row_of(gate: Gate, x: str, y: str, product: str, before: bool) -> tuple[Callable[..., Any], Any]:
    """y = h / rho * gain, of a row in the format of x, or in float64 with a gate before the norm; after it, * f(z).

    With ``before`` h / rho is rounded to bfloat16 first, and its product with the gain as the variant says. Returned
    with it is what reads an element of the row as float32.
    """
    on_x, on_y = gate.position == "before", gate.position == "after"
    read = _widened if x == "bfloat16" and not on_x else np.float32
    factor, is_out = _gated(gate) if on_y else _ungated
    is_near, is_tiny = (_is_near(_GATED), _is_tiny_or_zero) if gate.position else (_is_near(_FORWARD), _is_tiny)
    narrow_y = narrow if y == "bfloat16" else as_it_is
    cut = _cut if product == "bfloat16" and (on_y or y != "bfloat16") else as_it_is

    @inlined
    def row(h: Any, z: Any, gain: Any, inverse_rms: Any, y: Any, doubt: Any) -> None:
        for j in range(h.size):
            result = (read(h[j]) * inverse_rms) * gain[j] * factor(z[j])
            y[j] = narrow(result)
            doubt[j] = is_near(result) | is_tiny(result) | is_out(z[j])

    @inlined
    def row_before(h: Any, z: Any, gain: Any, inverse_rms: Any, y: Any, doubt: Any) -> None:
        for j in range(h.size):
            normalised = read(h[j]) * inverse_rms
            # exact, or rounded as the variant says
            result = cut(bits(widen(narrow(normalised))) * gain[j]) * factor(z[j])
            y[j] = narrow_y(result)
            doubt[j] = is_near(normalised) | is_tiny(normalised) | is_tiny(result) | is_out(z[j])
            if on_y:
                doubt[j] |= is_near(result)

    return row_before if before else row, read


def _gated(gate: Gate) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """f(z), and whether it may be too large, both in float32."""
    single, load = single_of(gate), load_single(gate.z)

    @inlined
    def factor(z: Any) -> Any:
        return single(load(z))

    @inlined
    def is_out(z: Any) -> Any:
        return not abs(load(z)) <= _LARGE

    return factor, is_out


@inlined
def _one(_: Any) -> Any:
    return np.float32(1)


@inlined
def _never(_: Any) -> Any:
    return False


_ungated: Final = (_one, _never)


@inlined
def _widened(half: Any) -> Any:
    return bits(widen(half))


@inlined
def _cut(single: Any) -> Any:
    """The nearest bfloat16, as a float32."""
    return bits(widen(narrow(single)))


def put_of(name: str) -> Callable[..., Any]:
    """The function that rounds a row in float64 once to a format, with memory for the marks of doubt."""
    store = STORE[name]

    def put(values: Any, y: Any, eights: Any, doubt: Any) -> None:
        for j in range(values.size):
            store(y, j, values[j])

    def put_bfloat(values: Any, y: Any, eights: Any, doubt: Any) -> None:
        for j in range(values.size):
            single = np.float32(values[j])  # half a unit from the value
            size = abs(single)
            y[j] = narrow(single)
            doubt[j] = is_near_one(single) | ((size < _NORMAL) & (size != 0)) | (not size < np.float32(np.inf))
        for i8 in range(eights.size if any_set(eights) else 0):
            if eights[i8]:
                for j in range(np.uint64(8 * i8), np.uint64(min(8 * i8 + 8, values.size))):
                    store(y, j, values[j])

    is_near_one = _is_near(1)
    return apart(put_bfloat if name == "bfloat16" else put)


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
def is_small(read: Any, h: Any, first: int) -> Any:
    """Whether the elements from ``first`` on are finite and below 2^60."""
    small = True
    for j in range(first, h.size):
        small &= abs(read(h[j])) < np.float32(2.0**60)
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


def _is_near(units: int) -> Any:
    @intrinsic
    def is_near(_: Any, single: Any) -> Any:
        """Whether the part that rounding cuts off is within so many units of one half."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            rest = builder.and_(builder.bitcast(args[0], _WORD), ir.Constant(_WORD, 0xFFFF))
            above = builder.sub(rest, ir.Constant(_WORD, 0x8000 - units))
            return builder.icmp_unsigned("<=", above, ir.Constant(_WORD, 2 * units))

        return types.boolean(types.float32), generate

    return is_near


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
def _is_tiny_or_zero(single: Any) -> Any:
    """With a gate, a product that underflowed may have been multiplied by more than 1."""
    return abs(single) < np.float32(2.0**-80)


@inlined
def _is_far_out(size: Any) -> Any:
    """Whether a size is not between 2^-80 and 2^80: 0, infinite or NaN, too."""
    return not (np.float32(2.0**-80) < size < np.float32(2.0**80))
