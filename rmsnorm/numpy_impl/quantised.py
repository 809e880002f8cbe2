"""The golden of RMSNorm followed by quantisation: every code is decided on a number of 106 bits.

A float32 operation of the specification is one of NumPy in float32. What the specification does not round is one
fraction until it is rounded to a format or its code is decided: so a tie is one exactly where it is one of real
numbers. Each step grows with |y|: amax, the scale of it, and the code for a given scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from rmsnorm.numpy_impl.arithmetic import Scaled, product_of, scaled, statistic, sum_of
from rmsnorm.numpy_impl.double_double import Array, DoubleDouble, round_to_odd
from rmsnorm.specification import dtypes, errors
from rmsnorm.specification.call import Spec
from rmsnorm.specification.quantisation import FACTORS, FORMATS, OF_AMAX, ROUNDINGS, SCALES, Quantisation
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Variant, check_eps

_OP: Final = "rms_norm_quantised"
_MOST: Final = np.float32(FORMATS["float32"].largest)
_UNIT: Final = scaled(np.ones(()))


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
    steps = Steps(x, scale, residual, eps, quantisation, static_scale, global_scale)
    outputs, lead = steps.outputs(), steps.call.shape[:-1]
    outputs["q"] = in_format(outputs["q"], steps.preset.element)
    return tuple(array.reshape(*lead, array.shape[-1]) if array.ndim else array for array in outputs.values())


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


class Steps:
    """The steps of a call, each from the one before: y, amax of its blocks, g, the scales, the codes."""

    def __init__(
        self, x: Any, gain: Any, residual: Any, eps: Any, quantisation: str | Quantisation, static_scale: Any = None,
        global_scale: Any = None,
    ) -> None:  # fmt: skip
        self.preset = preset = Quantisation.get(quantisation, _OP)
        if eps is None:
            raise errors.wrong_type(_OP, "eps", eps, "a number", "pass a float such as 1e-6")
        check_eps(_OP, eps)
        x, self.gain, residual = (None if a is None else np.asarray(a) for a in (x, gain, residual))
        for name, array in {"x": x, "residual": residual}.items():
            if array is not None and array.dtype.name == "float64":
                raise errors.wrong_dtype(_OP, name, "float64", dtypes.FLOATS[:3])
        of_x, *others = (None if a is None else Spec(a.shape, a.dtype.name) for a in (x, self.gain, residual))
        variant = Variant.get("standard").replace(eps=eps)
        self.call = resolve(_OP, of_x or Spec((), "none"), others[0], residual=others[1], variant=variant)
        self.size = preset.block if isinstance(preset.block, int) else self.call.n  # of a block
        if self.call.n % preset.size:
            want = f"a multiple of the {preset.block} elements of a block"
            raise errors.out_of_domain(_OP, "the last axis of x", self.call.n, want, "pad it")
        shape = math.prod(self.call.shape[:-1]), self.call.n
        self.x: Array = np.reshape(x, shape)
        self.residual = None if residual is None else residual.reshape(shape)
        self.static_scale = _positive("static_scale", static_scale, preset.block == "static")
        self.given_g = _positive("global_scale", global_scale, preset.global_scale == "given")

    def outputs(
        self, got: Mapping[str, Array] = MappingProxyType({}), error: float = 0.0, slack: float = 0.0
    ) -> dict[str, Array]:
        """The numbers of q, the scales, g if the call computes it, h if there is a residual: matrices of rows.

        Each is what follows from those that a function returned before it. 1 / rho has a relative error, which is
        -error where amax is taken: so both signs give the ends of every output. ``slack``: the error of y / s.
        """
        step = max(1, 2**15 // max(1, self.call.n))  # rows whose temporaries stay in cache
        blocks = [slice(start, start + step) for start in range(0, max(1, len(self.x)), step)]
        with np.errstate(all="ignore"):
            amax = np.concatenate([self.amax(self.y(rows, -error)) for rows in blocks])
            g = self.g(amax)
            own = got["g"].astype(np.float32) if "g" in got and got["g"] > 0 else g
            s, stored = self.scales(amax, own)
            if "scales" in got and self.preset.quantise_with == "stored":
                s = np.broadcast_to(got["scales"].astype(np.float32), amax.shape)
            q = np.concatenate([self.codes(self.y(rows, error), s[rows], own, slack) for rows in blocks])
            h = {} if self.residual is None else {"h": self.stored(slice(None))}
        return {"q": q, "scales": stored, **({"g": g} if self.preset.global_scale == "amax" else {}), **h}

    def stored(self, rows: slice) -> Array:
        """x + residual in T."""
        if self.residual is None:
            return self.x[rows]
        total = DoubleDouble(self.x[rows]) + DoubleDouble(self.residual[rows])
        return (total.truncate if self.preset.residual_rounding == "truncate" else total.round)(self.call.sum_dtype)

    def y(self, rows: slice, error: float) -> _Fraction:
        """y where 1 / rho has a relative error."""
        preset, sums = self.preset, {"stored": scaled(self.stored(rows)), "sum": scaled(self.x[rows])}
        if self.residual is not None:
            sums["sum"] = sum_of(sums["sum"], scaled(self.residual[rows]))
        everywhere = np.ones(self.x[rows].shape, bool)
        data = statistic(self.call, sums[preset.statistic_reads], everywhere, everywhere, None, None)
        y = _Fraction(sums[preset.values_read], _UNIT)
        for step in ("norm", "gain") if preset.order == "norm_first" else ("gain", "norm"):
            if step == "norm":
                y = _Fraction(product_of(y.top, scaled(np.asarray(1.0 + error))), (data.rho, data.exponent))
            elif self.gain is not None:
                gain = DoubleDouble(self.gain)
                factor = gain if preset.offset == "none" else DoubleDouble(1.0) + gain
                is_exact = preset.offset != "rounded"
                y = y.times(factor.fraction() if is_exact else scaled(factor.round(self.gain.dtype.name)))
            if preset.round_norm if step == "norm" else preset.round_gain:
                y = y.rounded(self.call.sum_dtype)
        return y

    def amax(self, y: _Fraction) -> Array:
        """float32(max |y|) of every block: the largest of the rounded numbers, as rounding is monotone."""
        number, exponent = y.value()
        sizes = np.abs(number.round("float32", exponent))
        blocks = sizes.reshape(len(sizes), self.call.n // self.size if self.size else 1, self.size)
        return np.maximum(self._largest(blocks, 2), np.float32(self.preset.amax_floor))

    def _largest(self, sizes: Array, axis: int | None = None) -> Array:
        function = np.fmax if self.preset.amax_nan == "drop" else np.maximum
        return np.asarray(function.reduce(sizes, axis=axis, initial=np.float32(0.0)))

    def g(self, amax: Array) -> Array:
        """That of the call, or of the whole array; 1 where there is none."""
        if self.preset.global_scale != "amax":
            return self.given_g
        largest = self._largest(amax)
        g = np.minimum(np.float32(FORMATS["e4m3fn"].largest * self.preset.qmax) / largest, _MOST)
        return np.where((largest == 0) | (g == 0), np.float32(1), g)

    def scales(self, amax: Array, g: Array) -> tuple[Array, Array]:
        """What y is divided by, in float32, and what is returned, in its format."""
        preset = self.preset
        if preset.block == "static":
            return np.broadcast_to(self.static_scale, amax.shape), self.static_scale
        s = np.maximum(SCALES[preset.scale](amax, np.float32(preset.qmax), g), np.float32(preset.scale_floor))
        name, mode, number = preset.scale_format, preset.scale_round, s.astype(np.float64)
        if name == "e8m0fnu":
            if mode in OF_AMAX:
                number = np.minimum(amax.astype(np.float64), 2.0**128) / 2.0 ** (math.frexp(preset.qmax)[1] - 1)
            number = np.maximum(number, 2.0 ** FORMATS[name].least)
        mantissa = 0 if preset.element == "int8" else FORMATS[preset.element].mantissa
        rounding = (1 - 2.0 ** -(mantissa + 1), "larger") if mode == "even" else ROUNDINGS[mode]
        overflow = "saturate" if name in ("e8m0fnu", "e4m3fn") else "nan"
        stored = in_format(rounded(DoubleDouble(number), name, rounding, overflow, 0.0, FORMATS[name].largest), name)
        return (stored.astype(np.float32) if preset.quantise_with == "stored" else s), stored

    def codes(self, y: _Fraction, s: Array, g: Array, error: float) -> Array:
        """Their numbers in float64, for y / s with a relative error: infinity where they leave a format."""
        preset, s = self.preset, np.repeat(s, self.size, axis=1)
        y = y.times(scaled(np.asarray(1.0 + error)))
        factor = FACTORS[preset.apply](s, g)
        if preset.zero_scale == "zero":
            factor = np.where(s == 0, np.float32(0.0), factor)
        elif preset.zero_scale == "largest":
            factor = np.minimum(factor, _MOST)
        is_quotient = preset.apply == "y / s"
        number, exponent = (_Fraction(y.value(), scaled(s)) if is_quotient else y.times(scaled(factor))).value()
        if preset.round_scaled == "none":
            number = number.scaled(np.clip(exponent, -(2**12), 2**12))  # 0, infinity are far from all codes
        else:
            number = DoubleDouble(number.round(preset.round_scaled, exponent))
        codes = rounded(number, preset.element, ROUNDINGS[preset.rounding], preset.overflow, preset.qmin, preset.qmax)
        return np.where(np.isnan(codes), {"nan": np.nan, "qmax": preset.qmax, "zero": 0.0}[preset.nan], codes)


def _positive(name: str, number: Any, is_used: bool) -> Array:
    """A scale of the call; 1 where it has none."""
    if (number is not None) != is_used:
        want, fix = ("a number", "pass it") if is_used else ("None", "leave it out")
        raise errors.out_of_domain(_OP, name, number, f"{want} for this quantisation", fix)
    value = np.asarray(1.0 if number is None else number, np.float32)
    if value.size != 1 or not value > 0:
        raise errors.out_of_domain(_OP, name, number, "one number > 0", "pass one scale for the whole array")
    return value.reshape(())


def dtype_of(name: str) -> Any:
    """The dtype of a format."""
    full = FORMATS[name].dtype
    if not hasattr(ml_dtypes if "_" in full else np, full):
        want, fix = f"0.5 or newer, which has {full}", "update it"
        raise errors.out_of_domain(_OP, "the version of ml_dtypes", ml_dtypes.__version__, want, fix)
    return np.dtype(full)


def rounded(v: DoubleDouble, name: str, rounding: tuple[float, str], overflow: str, least: float, most: float) -> Array:
    """Each number, rounded to one of a format, which has some beyond its largest where they wrap. NaN stays."""
    exact = round_to_odd(v.hi, v.lo)  # on the same side of every tie
    _, mantissa, exponent, largest = FORMATS[name]
    size = np.minimum(np.abs(exact), max(2.0**40, 2 * largest))  # beyond all numbers; an integer of no last eight bits
    step = np.ldexp(1.0, np.maximum(np.frexp(size)[1] - 1, exponent) - mantissa)
    below = np.floor(size / step)
    rest, (share, then) = size / step - below, rounding
    is_up = {"larger": np.True_, "smaller": np.False_, "even": below % 2 == 1}[then]
    size = (below + ((rest > share) | ((rest == share) & is_up))) * step
    if overflow == "saturate":
        size = np.minimum(size, np.where(np.signbit(exact), -least, most))
    elif overflow == "nan":
        size = np.where(size > largest, np.inf, size)
    return np.asarray(np.copysign(size, exact))


def in_format(numbers: Array, name: str) -> Array:
    """Numbers of a format in its dtype: infinity is its NaN where it has none, and an integer keeps its last bits."""
    if name == "int8":
        return numbers.astype(np.int64).astype(np.int8)
    return np.where(np.isinf(numbers) & (name in ("e4m3fn", "e4m3fnuz")), np.nan, numbers).astype(dtype_of(name))
