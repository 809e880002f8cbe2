"""The golden of RMSNorm followed by quantisation: every code is decided on a number of 106 bits.

A float32 operation of the specification is one operation of NumPy in float32. What the specification does not round is
one fraction, of an exact product and rho, until it is rounded to a format or its code is decided: so a tie is one
exactly where it is one of real numbers. Codes are looked up in the table of the format's numbers: a cast of ml_dtypes
rounds twice and does not saturate.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from rmsnorm.numpy_impl.arithmetic import Scaled, product_of, scaled, statistic, sum_of
from rmsnorm.numpy_impl.double_double import Array, DoubleDouble
from rmsnorm.specification import dtypes, errors
from rmsnorm.specification.call import Call, Spec
from rmsnorm.specification.quantisation import FORMATS, Quantisation, get_quantisation
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Variant, check_eps

_BLOCK: Final = 2**15  # elements: the temporaries of a block of rows stay in cache
_NAN: Final = {"e4m3fn": 0x7F, "e5m2": 0x7E, "e4m3fnuz": 0x80}
_MOST: Final = np.float32(2.0**128 - 2.0**104)  # the largest float32
_ONE: Final = np.float32(1.0)
_UNIT: Final = scaled(np.ones(()))
_E4M3: Final = Quantisation(name="")  # the rounding of a scale to e4m3fn


class _Inputs(NamedTuple):
    """The checked arguments of a call, x and residual as matrices."""

    call: Call
    preset: Quantisation
    x: Array
    scale: Array | None
    residual: Array | None
    static_scale: Array
    global_scale: Array

    @property
    def rows(self) -> list[slice]:
        step = max(1, _BLOCK // max(1, self.x.shape[1]))
        return [slice(start, start + step) for start in range(0, len(self.x), step)]

    @property
    def blocks(self) -> int:
        """The number of scales in a row."""
        return self.x.shape[1] // self.preset.block if isinstance(self.preset.block, int) else 1


def rms_norm_quantised(
    x: Any,
    scale: Any = None,
    *,
    residual: Any = None,
    static_scale: Any = None,
    global_scale: Any = None,
    eps: float = 1e-6,
    quantisation: str | Quantisation,
) -> tuple[Any, ...]:
    """RMSNorm along the last axis, then quantisation.

        q = code(y / s),    y = h / rho * (o + scale),    h = x + residual,    rho = sqrt(mean(h_i^2) + eps)

    with the roundings of the quantisation, and its scale s of every block of y.

    Args:
        x: f16, bf16 or f32, any shape of at least one axis.
        scale: gain, of the size of the last axis; None multiplies by 1, without the offset.
        residual: shaped as x, added to it first.
        static_scale: s, one number > 0, where ``block`` is ``static``.
        global_scale: g, one number > 0, where ``global_scale`` of the quantisation is ``given``.
        eps: a finite number >= 0.
        quantisation: name of a preset or a Quantisation.

    Returns:
        (q, scales), q shaped as x in int8 or a dtype of ml_dtypes, one number for each element. The scales are in their
        format, shaped as x but for the last axis, which has an entry for each block; a static scale is one float32.
        g follows if the call computes it, as a float32, and then, with ``residual``, h in the dtype of x + residual.

    Raises:
        TypeError: an array has a wrong dtype, or an option a wrong type.
        ValueError: a shape does not fit, an option is out of its domain, a scale is missing or is not used.

    Example:
        >>> import numpy as np
        >>> q, s = rms_norm_quantised(np.float32([[3, -4, 0, 5]]), eps=0, quantisation="onnx.qdq", static_scale=0.5)
        >>> q
        array([[ 2, -2,  0,  3]], dtype=int8)
    """
    op = "rms_norm_quantised"
    preset = get_quantisation(op, quantisation)
    takes_global, is_static = preset.global_scale == "given", preset.block == "static"
    inputs = _inputs(op, x, scale, residual, static_scale, global_scale, eps, preset, takes_global)
    amax, g = np.zeros((len(inputs.x), inputs.blocks), np.float32), inputs.global_scale
    with np.errstate(all="ignore"):
        for rows in () if is_static else inputs.rows:
            amax[rows] = _amax(preset, _normalised(inputs, rows), inputs.blocks)
        if preset.global_scale == "amax":
            g = _global(preset, amax)
        s, codes = (np.broadcast_to(inputs.static_scale, amax.shape),) * 2 if is_static else _scales(preset, amax, g)
        q = np.empty(inputs.x.shape, np.uint8)
        for rows in inputs.rows:
            q[rows] = _code(preset, _quotient(preset, _normalised(inputs, rows), s[rows], g))
        h = _stored(inputs, slice(None)).reshape(inputs.call.shape)
    return (
        q.view(_dtype(preset.element)).reshape(inputs.call.shape),
        inputs.static_scale if is_static else codes.reshape(*inputs.call.shape[:-1], inputs.blocks),
        *((g,) if preset.global_scale == "amax" else ()),
        *(() if residual is None else (h,)),
    )


def allowed(
    x: Any,
    scale: Any,
    scales: Any,
    *,
    slack: float,
    residual: Any = None,
    global_scale: Any = None,
    eps: float = 1e-6,
    quantisation: str | Quantisation,
    reciprocal_slack: float = 0.0,
) -> tuple[Array, Array]:
    """What a kernel may return for each element that computes 1 / rho to a relative error of ``slack``.

        low, high = the least and the greatest of code(y / s) for 1 / rho in (1 -+ slack) / rho

    Every rounding is monotone, so no code between the two can be excluded, and the golden's is one of them.

    Args:
        x, scale, residual, eps, quantisation: as for rms_norm_quantised.
        scales: those that the kernel returned, in its shape, or its static scale: a kernel is judged by its own. With
            ``quantise_with="unrounded"`` they do not matter, and s is that of the same interval of 1 / rho.
        slack: relative, 0 <= slack < 1. It is also that of y where y is not rounded.
        global_scale: g, as it was passed or as the kernel computed it.
        reciprocal_slack: relative, of the factor by which y is multiplied where the kernel approximates it. Then every
            tie has two codes: with y in bfloat16, and s a power of two, one in 16 codes of E4M3 is one.

    Returns:
        (low, high), the numbers of the codes as float64, NaN where NaN has a code of its own. Infinity is a code beyond
        the largest where it does not saturate; where integers wrap, they have not yet wrapped.

    Example:
        >>> import numpy as np
        >>> x, s = np.float32([[3, -4, 0, 5]]), np.float32(0.5)
        >>> low, high = allowed(x, None, s, slack=2**-20, eps=0, quantisation="onnx.qdq")
        >>> low, high
        (array([[ 2., -2.,  0.,  3.]]), array([[ 2., -2.,  0.,  3.]]))
    """
    op = "allowed"
    preset = get_quantisation(op, quantisation)
    static = scales if preset.block == "static" else None
    inputs = _inputs(op, x, scale, residual, static, global_scale, eps, preset, preset.global_scale != "none")
    for name, number in (("slack", slack), ("reciprocal_slack", reciprocal_slack)):
        if not 0 <= number < 1:
            raise errors.out_of_domain(op, name, number, "a number in [0, 1)", "pass one such as 1e-6")
    s, want = np.asarray(scales), (*inputs.call.shape[:-1], inputs.blocks)
    if static is None and s.shape != want:
        raise errors.wrong_shape(op, "scales", s.shape, want, "the blocks of x")
    s = np.broadcast_to(s if static is None else inputs.static_scale, want)
    s = s.astype(np.float32).reshape(len(inputs.x), inputs.blocks)  # which every format of a scale is within
    g = inputs.global_scale
    low, high = np.empty((2, *inputs.x.shape))
    with np.errstate(all="ignore"):
        for rows in inputs.rows:
            ends = [_normalised(inputs, rows, error) for error in (-slack, slack)]
            divisors = [s[rows], s[rows]]
            if preset.quantise_with == "unrounded":
                divisors = [_unrounded(preset, _amax(preset, y, inputs.blocks), g) for y in reversed(ends)]
            first, second = (
                _number(preset, _quotient(preset, y, divisor, g, error))
                for y, divisor, error in zip(ends, divisors, (-reciprocal_slack, reciprocal_slack), strict=True)
            )
            low[rows], high[rows] = np.minimum(first, second), np.maximum(first, second)
    return low.reshape(inputs.call.shape), high.reshape(inputs.call.shape)


def _inputs(
    op: str, x: Any, scale: Any, residual: Any, static_scale: Any, global_scale: Any, eps: Any, preset: Quantisation,
    has_global: bool,
) -> _Inputs:  # fmt: skip
    if eps is None:
        raise errors.wrong_type(op, "eps", eps, "a number", "pass a float such as 1e-6")
    check_eps(op, eps)
    x, scale, residual = (None if a is None else np.asarray(a) for a in (x, scale, residual))
    for name, array in {"x": x, "residual": residual}.items():
        if array is not None and array.dtype.name == "float64":
            raise errors.wrong_dtype(op, name, "float64", dtypes.FLOATS[:3])
    specs = [None if a is None else Spec(a.shape, a.dtype.name) for a in (x, scale, residual)]
    variant = Variant.get("standard").replace(eps=eps)
    call = resolve(op, specs[0] or Spec((), "none"), specs[1], residual=specs[2], variant=variant)
    n = call.n
    if isinstance(preset.block, int) and n % preset.block:
        want = f"a multiple of the {preset.block} elements of a block"
        raise errors.out_of_domain(op, "the last axis of x", n, want, "pad it")
    x, residual = (a if a is None else a.reshape(math.prod(call.shape[:-1]), n) for a in (x, residual))
    s = _positive(op, "static_scale", static_scale, preset.block == "static")
    return _Inputs(call, preset, x, scale, residual, s, _positive(op, "global_scale", global_scale, has_global))


def _positive(op: str, name: str, number: Any, is_used: bool) -> Array:
    """A scale of the call; 1 where it has none."""
    if (number is not None) != is_used:
        want, fix = ("a number", "pass it") if is_used else ("None", "leave it out")
        raise errors.out_of_domain(op, name, number, f"{want} for this quantisation", fix)
    value = np.asarray(1.0 if number is None else number, np.float32)
    if value.size != 1 or not value > 0:
        raise errors.out_of_domain(op, name, number, "one number > 0", "pass one scale for the whole array")
    return value.reshape(())


def _stored(inputs: _Inputs, rows: slice) -> Array:
    """x + residual in T."""
    if inputs.residual is None:
        return inputs.x[rows]
    total = DoubleDouble(inputs.x[rows]) + DoubleDouble(inputs.residual[rows])
    round_to = total.truncate if inputs.preset.residual_rounding == "truncate" else total.round
    return round_to(inputs.call.sum_dtype)


class _Fraction(NamedTuple):
    """top / bottom, of which the quotient is taken last."""

    top: Scaled
    bottom: Scaled

    def value(self) -> Scaled:
        return self.top[0] / self.bottom[0], self.top[1] - self.bottom[1]

    def times(self, factor: Scaled) -> _Fraction:
        return _Fraction(product_of(self.top, factor), self.bottom)

    def rounded(self, dtype: str) -> _Fraction:
        number, exponent = self.value()
        return _Fraction(scaled(number.round(dtype, exponent)), _UNIT)


def _normalised(inputs: _Inputs, rows: slice, error: float = 0.0) -> _Fraction:
    """y, with a relative error in 1 / rho."""
    preset, call = inputs.preset, inputs.call
    total, stored = scaled(inputs.x[rows]), scaled(_stored(inputs, rows))
    if inputs.residual is not None:
        total = sum_of(total, scaled(inputs.residual[rows]))
    everywhere = np.ones(total[0].hi.shape, bool)
    read = total if preset.statistic_reads == "sum" else stored
    data = statistic(call, read, everywhere, everywhere, None, None)
    y = _Fraction(total if preset.values_read == "sum" else stored, _UNIT)
    for step in ("norm", "gain") if preset.order == "norm_first" else ("gain", "norm"):
        if step == "norm":
            y = _Fraction(product_of(y.top, scaled(np.asarray(1.0 + error))), (data.rho, data.exponent))
        else:
            y = y.times(_gain(preset, inputs.scale))
        if preset.round_norm if step == "norm" else preset.round_gain:
            y = y.rounded(call.sum_dtype)
    return y


def _gain(preset: Quantisation, scale: Array | None) -> Scaled:
    if scale is None:
        return _UNIT
    gain = DoubleDouble(scale)
    if preset.offset != "none":
        gain = DoubleDouble(1.0) + gain
    return scaled(gain.round(scale.dtype.name)) if preset.offset == "rounded" else gain.fraction()


def _amax(preset: Quantisation, y: _Fraction, blocks: int) -> Array:
    """float32(max |y|) of every block: the largest of the rounded numbers, as rounding is monotone."""
    number, exponent = y.value()
    sizes = np.abs(number.round("float32", exponent))
    sizes = sizes.reshape(len(sizes), blocks, sizes.shape[1] // max(1, blocks))
    return np.maximum(_largest(preset, sizes, 2), np.float32(preset.amax_floor))


def _largest(preset: Quantisation, sizes: Array, axis: int | None) -> Array:
    function = np.fmax if preset.amax_nan == "drop" else np.maximum
    return np.asarray(function.reduce(sizes, axis=axis, initial=np.float32(0.0)))


def _global(preset: Quantisation, amax: Array) -> Array:
    largest = _largest(preset, amax, None)
    g = np.minimum(np.float32(_E4M3.qmax * preset.qmax) / largest, _MOST)
    return np.where((largest == 0) | (g == 0), _ONE, g)


def _unrounded(preset: Quantisation, amax: Array, g: Array) -> Array:
    """s before it is rounded to its format, by operations of float32."""
    inverse = _ONE / np.float32(preset.qmax)
    formulas: dict[str, Array] = {
        "amax / qmax": amax / np.float32(preset.qmax),
        "amax * (1 / qmax)": amax * inverse,
        "(g * amax) * (1 / qmax)": (g * amax) * inverse,
        "g * (amax * (1 / qmax))": g * (amax * inverse),
        "amax * (g * (1 / qmax))": amax * (g * inverse),
    }
    return np.asarray(np.maximum(formulas[preset.scale], np.float32(preset.scale_floor)))


def _scales(preset: Quantisation, amax: Array, g: Array) -> tuple[Array, Array]:
    """What y is divided by, in float32, and what is returned, in its format."""
    s = _unrounded(preset, amax, g)
    if preset.scale_format == "e8m0fnu":
        codes = _e8m0(preset, amax, s).view(_dtype("e8m0fnu"))
    elif preset.scale_format == "e4m3fn":
        codes = _code(_E4M3, DoubleDouble(s)).view(_dtype("e4m3fn"))
    else:
        codes = s.astype(preset.scale_format)
    return (codes.astype(np.float32) if preset.quantise_with == "stored" else s), codes


def _e8m0(preset: Quantisation, amax: Array, s: Array) -> Array:
    """The bytes of a power of two, 2^(byte - 127)."""
    mode = preset.scale_round
    number = s if mode in ("rceil", "nearest") else amax
    fraction, exponent = np.frexp(number.astype(np.float64))
    exponent = np.where(np.isinf(number), 128, exponent - 1)  # floor(log2), and what the bits of infinity say
    fraction = np.where(np.isinf(number), 1.0, 2 * fraction)  # in [1, 2)
    mantissa = 0 if preset.element == "int8" else FORMATS[preset.element].mantissa
    least = 2 - 2.0 ** -(mantissa + 1)  # which rounds up to 2 in the mantissa of the element
    above = {"floor": 2.0, "ceil": 1.0, "rceil": 1.0, "even": math.nextafter(least, 0), "nearest": math.sqrt(2)}[mode]
    exponent = exponent + (fraction > above)
    if mode in ("floor", "ceil", "even"):
        exponent = exponent - (np.frexp(preset.qmax)[1] - 1)
    byte = np.where(number == 0, 0, np.clip(exponent + 127, 0, 254))
    return np.where(np.isnan(number), 255, byte).astype(np.uint8)


def _quotient(preset: Quantisation, y: _Fraction, s: Array, g: Array, error: float = 0.0) -> DoubleDouble:
    """y / s, with a relative error; 0 and infinity stand for what is far below and beyond all codes."""
    s = np.repeat(s, y.top[0].hi.shape[1] // s.shape[1], axis=1) if s.size else s
    y = y.times(scaled(np.asarray(1.0 + error)))
    if preset.apply == "y / s":
        number, exponent = _Fraction(y.value(), scaled(s)).value()
    else:
        factor = {
            "y * (1 / s)": _ONE / s,
            "y * (g * (1 / s))": g * (_ONE / s),
            "y * (1 / (s * (1 / g)))": _ONE / (s * (_ONE / g)),
        }[preset.apply]
        if preset.zero_scale == "zero":
            factor = np.where(s == 0, np.float32(0.0), factor)
        elif preset.zero_scale == "largest":
            factor = np.minimum(factor, _MOST)
        number, exponent = y.times(scaled(factor)).value()
    if preset.round_scaled != "none":
        return DoubleDouble(number.round(preset.round_scaled, exponent))
    return number.scaled(np.clip(exponent, -(2**12), 2**12))


def _dtype(name: str) -> Any:
    if name == "int8":
        return np.int8
    full = f"float{4 if name == 'e2m1fn' else 8}_{name}"
    if not hasattr(ml_dtypes, full):
        want, fix = f"0.5 or newer, which has {full}", "update it"
        raise errors.out_of_domain("rms_norm_quantised", "the version of ml_dtypes", ml_dtypes.__version__, want, fix)
    return getattr(ml_dtypes, full)


@lru_cache(maxsize=8)
def _numbers(element: str) -> Array:
    """The numbers >= 0 of a format, by code, and one more that it would have if it went on."""
    mantissa, least, largest = FORMATS[element]
    codes = np.arange(256)
    exponent, rest = np.maximum(codes >> mantissa, 1), codes & (2**mantissa - 1)
    fraction = np.where(codes >> mantissa, 2**mantissa + rest, rest)
    numbers = np.ldexp(fraction.astype(np.float64), exponent - 1 + least - mantissa)
    return numbers[: np.searchsorted(numbers, largest) + 2]


def _place(v: DoubleDouble, numbers: Array | None) -> tuple[Array, Array, Array]:
    """Of |v|: the code at or below it, whether it is above the middle to the next one, and whether it is that middle.

    Without a table the numbers are the integers. What is beyond the last number, or 2^40, is at it.
    """
    hi = np.minimum(np.where(np.isnan(v.hi), 0.0, np.abs(v.hi)), 2.0**40)
    lo = np.where(hi == np.abs(v.hi), np.where(np.signbit(v.hi), -v.lo, v.lo), 0.0)
    if numbers is None:
        low = np.floor(hi)
        low = np.where((low == hi) & (lo < 0), low - 1, low).astype(np.int64)
        middle = low + 0.5
    else:
        low = np.searchsorted(numbers, hi, side="right") - 1
        low = np.where((numbers[low] == hi) & (lo < 0), low - 1, low)
        beyond = np.append(numbers, np.inf)  # of which no middle exists
        middle = (beyond[low] + beyond[low + 1]) / 2
    return low, (hi > middle) | ((hi == middle) & (lo > 0)), (hi == middle) & (lo == 0)


def _index(preset: Quantisation, v: DoubleDouble) -> Array:
    """Of |v|, rounded to a code, which may be beyond the last."""
    low, above, tie = _place(v, None if preset.element == "int8" else _numbers(preset.element))
    up = {
        "half_even": above | (tie & (low % 2 == 1)),
        "half_away": above | tie,
        "half_down": above,
        "truncate": np.zeros_like(above),
    }[preset.rounding]
    index = low + up
    if preset.overflow != "saturate":
        return index
    top = _last(preset)
    return np.minimum(index, np.where(np.signbit(v.hi) & (preset.qmin == -128), 128, top))


def _last(preset: Quantisation) -> int:
    """The code of qmax."""
    return int(preset.qmax) if preset.element == "int8" else int(np.searchsorted(_numbers(preset.element), preset.qmax))


def _code(preset: Quantisation, v: DoubleDouble) -> Array:
    """The bits of the code of each number."""
    index, negative, is_nan = _index(preset, v), np.signbit(v.hi), np.isnan(v.hi)
    if preset.element == "int8":
        number = np.where(negative, -index, index)
        nan = int(preset.qmax) if preset.nan == "qmax" else 0
        return (np.where(is_nan, nan, number) & 0xFF).astype(np.uint8)
    sign = 0x8 if preset.element == "e2m1fn" else 0x80
    last = len(_numbers(preset.element)) - 2
    of_nan = _NAN.get(preset.element, 0)
    bits = index + np.where(negative, sign, 0)
    if preset.element == "e4m3fnuz":
        bits = np.where(index == 0, 0, bits)
    overflow = np.where(negative, 0xFC, 0x7C) if preset.element == "e5m2" else of_nan  # infinity, or NaN
    bits = np.where(index > last, overflow, bits)
    nan = {"nan": of_nan, "qmax": _last(preset), "zero": 0}[preset.nan]
    return np.where(is_nan, nan, bits).astype(np.uint8)


def _number(preset: Quantisation, v: DoubleDouble) -> Array:
    """The number of the code of each, as ``allowed`` returns it."""
    index, is_nan = _index(preset, v), np.isnan(v.hi)
    if preset.element == "int8":
        size = index.astype(np.float64)
    else:
        numbers = _numbers(preset.element)
        size = np.append(numbers[:-1], np.inf)[np.minimum(index, len(numbers) - 1)]
    nan = {"nan": np.nan, "qmax": preset.qmax, "zero": 0.0}[preset.nan]
    return np.where(is_nan, nan, np.where(np.signbit(v.hi), -size, size))
