"""The four formats in compiled code: read to float64, rounded once, written. f16 is stored as int16, bf16 as uint16.

A function that is ``inlined`` becomes part of its caller before anything is compiled. For a small function that is
quicker than to compile it ``apart``; large functions are compiled in less time if their parts are apart.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from rmsnorm import dtypes
from rmsnorm.cpu import target
from rmsnorm.cpu.settings import BF16, F16, F32

inlined: Final = njit(inline="always")
apart: Final = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)

# Whether the processor converts f16 to f32 and back, as nearly every one does: on x86, on ARM.
_HAS_HALF: Final = target.has("f16c") or target.has("fp-armv8")

_EXPONENT: Final = np.int64(0x7FF0000000000000)
_OVERFLOW: Final = {
    "float16": 2.0**16,
    "bfloat16": 2.0**128,
    "float32": 2.0**128,
}


def _grid(name: str) -> tuple[np.int64, float, float]:
    """The number that ``rounded`` adds to an exponent, the least of such sums, and where numbers become infinite."""
    step = 1.5 * 2.0**52
    up = np.float64(step * dtypes.epsilon(name)).view(np.int64) - np.float64(1.0).view(np.int64)
    return up, step * dtypes.smallest_subnormal(name), _OVERFLOW[name]


# Of no format and of f64: the sum is negative, so that the least is used: 0.
_AS_IT_IS: Final[tuple[Any, float, float]] = (np.iinfo(np.int64).min, 0.0, np.inf)
_HALF, _BFLOAT, _SINGLE = (_grid(name) for name in _OVERFLOW)


@intrinsic
def bits(_: Any, number: Any) -> Any:
    """The bits of a float as an integer, and the other way round."""
    pairs = {types.float32: types.uint32, types.float64: types.int64, types.uint32: types.float32}
    other = pairs.get(number, types.float64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(other))

    return other(number), generate


@intrinsic
def fma(_: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in one rounding."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float64(types.float64, types.float64, types.float64), generate


@intrinsic
def multiply_add(_: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, in one rounding if the processor has an instruction for it; in float32 if all three are of it."""
    number = types.float32 if a == b == c == types.float32 else types.float64
    return number(number, number, number), _multiply_add()


@intrinsic
def add_product_in_any_order(_: Any, a: Any, b: Any, total: Any) -> Any:
    """a * b + total, as one of many such sums that the compiler may add in another order: only so can it vectorise."""
    return types.float64(types.float64, types.float64, types.float64), _multiply_add("reassoc")


def _multiply_add(*flags: str) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = args[0].type
        function = builder.module.declare_intrinsic("llvm.fmuladd", (number,), ir.FunctionType(number, [number] * 3))
        return builder.call(function, args, fastmath=flags)

    return generate


@intrinsic
def shifted(_: Any, single: Any) -> Any:
    """2 to the power of the integer in the last bits of a float32. numba's own operators would make it 64 bits wide."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        biased = builder.add(builder.bitcast(args[0], word), ir.Constant(word, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(word, 23)), ir.FloatType())

    return types.float32(types.float32), generate


@intrinsic
def view(_: Any, address: Any, size: Any, like: Any) -> Any:
    """The memory at an address as a vector of so many numbers, of the type of the number ``like``."""
    vector = types.Array(like, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        item = context.get_data_type(like)
        width = ir.Constant(ir.IntType(64), context.get_abi_sizeof(item))
        array = make_array(vector)(context, builder)
        data = builder.inttoptr(args[0], item.as_pointer())
        populate_array(array, data=data, shape=[args[1]], strides=[width], itemsize=width, meminfo=None)
        return array._getvalue()

    return vector(types.int64, types.int64, like), generate


@intrinsic
def widen(_: Any, half: Any) -> Any:
    """The bits of a float32 from those of a bfloat16. numba's own operators would make the word 64 bits wide."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        return builder.shl(builder.zext(args[0], word), ir.Constant(word, 16))

    return types.uint32(types.uint16), generate


@inlined
def sum_error(a: float, b: float, total: float) -> Any:
    """a + b - total, exactly: Knuth."""
    t = total - a
    return finite((a - (total - t)) + (b - t))


@inlined
def finite(error: float) -> Any:
    return error if math.isfinite(error) else 0.0


@inlined
def _load_plain(number: Any) -> Any:
    return np.float64(number)


@inlined
def _load_bfloat(number: Any) -> Any:
    return np.float64(bits(widen(number)))


@intrinsic
def _half_to_single(_: Any, half: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), generate


@intrinsic
def _single_to_half(_: Any, single: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), generate


@apart
def half_to_single_in_software(number: Any) -> Any:
    half = np.uint32(number)
    magnitude = np.uint32(half & np.uint32(0x7FFF))
    sign = np.uint32((half & np.uint32(0x8000)) << np.uint32(16))
    shifted = np.uint32(magnitude << np.uint32(13))
    normal = np.uint32(shifted + np.uint32(112 << 23))
    special = np.uint32(shifted | np.uint32(255 << 23))
    tiny = bits(np.float32(np.int32(magnitude)) * np.float32(2.0**-24))
    pattern = special if magnitude >= np.uint32(0x7C00) else (normal if magnitude >= np.uint32(0x400) else tiny)
    return bits(np.uint32(pattern | sign))


@inlined
def _load_half(number: Any) -> Any:
    return np.float64(_half_to_single(number) if _HAS_HALF else half_to_single_in_software(number))


# A stored number as float64.
LOAD: Final = {"float16": _load_half, "bfloat16": _load_bfloat, "float32": np.float64, "float64": np.float64}


@inlined
def grid(code: Any) -> Any:
    """The numbers that ``rounded`` needs for the format of a code. For no format and for f64 it changes no number."""
    result = _AS_IT_IS
    if code == F16:
        result = _HALF
    elif code == BF16:
        result = _BFLOAT
    elif code == F32:
        result = _SINGLE
    return result


@inlined
def rounded(number: Any, grid: Any) -> Any:
    """A number rounded once to a format, to nearest even, also among its subnormal numbers.

    A large number is added and subtracted again. It is so large that the last place of the sum is that of the format.
    """
    up, least, overflow = grid
    large = bits((bits(number) & _EXPONENT) + up)
    if large < least:
        large = least
    nearest = math.copysign((number + large) - large, number)
    return nearest if abs(nearest) < overflow else number * np.inf


@inlined
def _round_half(number: Any) -> Any:
    return rounded(number, _HALF)


@inlined
def _round_bfloat(number: Any) -> Any:
    return rounded(number, _BFLOAT)


@inlined
def _round_single(number: Any) -> Any:
    return np.float64(np.float32(number))


# A float64 rounded once to a format.
ROUND: Final = {"float16": _round_half, "bfloat16": _round_bfloat, "float32": _round_single, "float64": _load_plain}


@apart
def single_to_half_in_software(number: Any) -> Any:
    """The bits of a float16 from those of a float32 that is exactly a float16."""
    single = bits(number)
    magnitude = np.uint32(single & np.uint32(0x7FFFFFFF))
    sign = np.uint32((single >> np.uint32(16)) & np.uint32(0x8000))
    normal = np.uint32((magnitude - np.uint32(112 << 23)) >> np.uint32(13))
    tiny = np.uint32(np.int32(bits(magnitude) * np.float32(2.0**24)))
    special = np.uint32(0x7C00) if magnitude == np.uint32(255 << 23) else np.uint32(0x7E00)
    finite = normal if magnitude >= np.uint32(113 << 23) else tiny
    return np.int16(sign | (special if magnitude >= np.uint32(255 << 23) else finite))


@inlined
def _store_plain(vector: Any, index: Any, number: Any) -> None:
    vector[index] = number


@inlined
def _store_bfloat(vector: Any, index: Any, number: Any) -> None:
    vector[index] = np.uint16(bits(np.float32(rounded(number, _BFLOAT))) >> np.uint32(16))


@inlined
def _store_half(vector: Any, index: Any, number: Any) -> None:
    nearest = np.float32(rounded(number, _HALF))
    vector[index] = _single_to_half(nearest) if _HAS_HALF else single_to_half_in_software(nearest)


# Writes a float64 into a vector, rounded once.
STORE: Final = {"float16": _store_half, "bfloat16": _store_bfloat, "float32": _store_plain, "float64": _store_plain}
