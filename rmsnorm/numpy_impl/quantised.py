"""The golden of RMSNorm followed by quantisation: every code is decided on a number of 106 bits.

A float32 operation of the specification is one operation of NumPy in float32. What the specification does not round is
one fraction, of an exact product and rho, until it is rounded to a format or its code is decided: so a tie is one
exactly where it is one of real numbers.

Each step grows with |y|: amax, the scale of it, and the code for a given scale. So an interval of y gives intervals of
the outputs, from the steps of its two ends. ``rmsnorm.parity.quantised`` compares a kernel with these.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from rmsnorm.numpy_impl.arithmetic import Scaled, product_of, scaled, statistic, sum_of
from rmsnorm.numpy_impl.double_double import Array, DoubleDouble, round_to_odd
from rmsnorm.specification import dtypes, errors
from rmsnorm.specification.call import Spec
from rmsnorm.specification.quantisation import FORMATS, Quantisation, get_quantisation
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Variant, check_eps

_OP: Final = "rms_norm_quantised"
_MOST: Final = np.float32(2.0**128 - 2.0**104)  # the largest float32
_ONE: Final = np.float32(1.0)
_UNIT: Final = scaled(np.ones(()))
_E4M3: Final = Quantisation(name="")  # the rounding of a scale to e4m3fn
_EVERY: Final = slice(None)


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
    steps = Steps(
        x, scale, residual, static_scale=static_scale, global_scale=global_scale, eps=eps, quantisation=quantisation
    )
    preset, shape = steps.preset, steps.call.shape
    with np.errstate(all="ignore"):
        amax = np.concatenate([steps.amax(steps.y(rows)) for rows in steps.blocks])
        g = steps.g(amax)
        divisors, stored = steps.scales(amax, g)
        q = np.concatenate([steps.numbers(steps.y(rows), divisors[rows], g) for rows in steps.blocks])
        h = steps.stored().reshape(shape)
    return (
        in_format(q, preset.element).reshape(shape),
        stored.reshape(*shape[:-1], amax.shape[1]) if stored.ndim else stored,
        *((g,) if preset.global_scale == "amax" else ()),
        *(() if residual is None else (h,)),
    )


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
    """The steps of a call, each from the one before: y, amax of its blocks, g, the scales, the numbers of the codes."""

    def __init__(
        self, x: Any, gain: Any, residual: Any, *, static_scale: Any = None, global_scale: Any = None, eps: Any,
        quantisation: str | Quantisation,
    ) -> None:  # fmt: skip
        self.preset = preset = get_quantisation(_OP, quantisation)
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
        if isinstance(preset.block, int) and self.call.n % preset.block:
            want = f"a multiple of the {preset.block} elements of a block"
            raise errors.out_of_domain(_OP, "the last axis of x", self.call.n, want, "pad it")
        shape = math.prod(self.call.shape[:-1]), self.call.n
        self.x: Array = np.reshape(x, shape)
        self.residual = None if residual is None else residual.reshape(shape)
        self.static_scale = _positive("static_scale", static_scale, preset.block == "static")
        self.given_g = _positive("global_scale", global_scale, preset.global_scale == "given")

    @property
    def blocks(self) -> list[slice]:
        """Rows whose temporaries stay in cache."""
        step = max(1, 2**15 // max(1, self.call.n))
        return [slice(start, start + step) for start in range(0, max(1, len(self.x)), step)]

    def stored(self, rows: slice = _EVERY) -> Array:
        """x + residual in T."""
        if self.residual is None:
            return self.x[rows]
        total = DoubleDouble(self.x[rows]) + DoubleDouble(self.residual[rows])
        return (total.truncate if self.preset.residual_rounding == "truncate" else total.round)(self.call.sum_dtype)

    def y(self, rows: slice = _EVERY, error: float = 0.0) -> _Fraction:
        """y where 1 / rho has a relative error."""
        preset, stored, total = self.preset, scaled(self.stored(rows)), scaled(self.x[rows])
        if self.residual is not None:
            total = sum_of(total, scaled(self.residual[rows]))
        everywhere = np.ones(total[0].hi.shape, bool)
        read = total if preset.statistic_reads == "sum" else stored
        data = statistic(self.call, read, everywhere, everywhere, None, None)
        y = _Fraction(total if preset.values_read == "sum" else stored, _UNIT)
        for step in ("norm", "gain") if preset.order == "norm_first" else ("gain", "norm"):
            if step == "norm":
                y = _Fraction(product_of(y.top, scaled(np.asarray(1.0 + error))), (data.rho, data.exponent))
            elif self.gain is not None:
                y = y.times(self._factor(self.gain))
            if preset.round_norm if step == "norm" else preset.round_gain:
                y = y.rounded(self.call.sum_dtype)
        return y

    def _factor(self, gain: Array) -> Scaled:
        offset = self.preset.offset
        factor = DoubleDouble(gain) if offset == "none" else DoubleDouble(1.0) + DoubleDouble(gain)
        return scaled(factor.round(gain.dtype.name)) if offset == "rounded" else factor.fraction()

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
        g = np.minimum(np.float32(_E4M3.qmax * self.preset.qmax) / largest, _MOST)
        return np.where((largest == 0) | (g == 0), _ONE, g)

    def scales(self, amax: Array, g: Array) -> tuple[Array, Array]:
        """What y is divided by, in float32, and what is returned, in its format."""
        preset, qmax = self.preset, np.float32(self.preset.qmax)
        if preset.block == "static":
            return np.broadcast_to(self.static_scale, amax.shape), self.static_scale
        formulas: dict[str, Array] = {  # by operations of float32
            "amax / qmax": amax / qmax,
            "amax * (1 / qmax)": amax * (_ONE / qmax),
            "(g * amax) * (1 / qmax)": (g * amax) * (_ONE / qmax),
            "g * (amax * (1 / qmax))": g * (amax * (_ONE / qmax)),
            "amax * (g * (1 / qmax))": amax * (g * (_ONE / qmax)),
        }
        s = stored = np.maximum(formulas[preset.scale], np.float32(preset.scale_floor))
        if preset.scale_format == "e8m0fnu":
            stored = self._e8m0(amax, s).view(dtype_of("e8m0fnu"))
        elif preset.scale_format != "float32":
            numbers = _rounded(_E4M3, DoubleDouble(s)) if preset.scale_format == "e4m3fn" else s
            stored = in_format(numbers, preset.scale_format)
        return (stored.astype(np.float32) if preset.quantise_with == "stored" else s), stored

    def _e8m0(self, amax: Array, s: Array) -> Array:
        """The bytes of a power of two, 2^(byte - 127)."""
        mode, element = self.preset.scale_round, self.preset.element
        number = s if mode in ("rceil", "nearest") else amax
        fraction, exponent = np.frexp(number.astype(np.float64))
        is_infinite = np.isinf(number)  # of whose bits the exponent is 128
        mantissa = 0 if element == "int8" else FORMATS[element].mantissa
        even = math.nextafter(1 - 2.0 ** -(mantissa + 2), 0)  # above it, the mantissa of the element rounds up to 1
        limits = {"floor": 1.0, "ceil": 0.5, "rceil": 0.5, "even": even, "nearest": math.sqrt(0.5)}
        exponent = np.where(is_infinite, 128, exponent - 1 + (fraction > limits[mode]))
        if mode in ("floor", "ceil", "even"):
            exponent = exponent - (np.frexp(self.preset.qmax)[1] - 1)
        byte = np.where(number == 0, 0, np.clip(exponent + 127, 0, 254))
        return np.where(np.isnan(number), 255, byte).astype(np.uint8)

    def numbers(self, y: _Fraction, s: Array, g: Array, error: float = 0.0) -> Array:
        """Those of the codes in float64, for y / s with a relative error: infinity where they leave a format."""
        preset, s = self.preset, np.repeat(s, self.size, axis=1)
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
            return _rounded(preset, DoubleDouble(number.round(preset.round_scaled, exponent)))
        return _rounded(preset, number.scaled(np.clip(exponent, -(2**12), 2**12)))  # 0, infinity are far from all codes


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
    if name in ("float32", "float16", "bfloat16", "int8"):
        return getattr(ml_dtypes, name, name)
    full = f"float{4 if name == 'e2m1fn' else 8}_{name}"
    if not hasattr(ml_dtypes, full):
        want, fix = f"0.5 or newer, which has {full}", "update it"
        raise errors.out_of_domain(_OP, "the version of ml_dtypes", ml_dtypes.__version__, want, fix)
    return getattr(ml_dtypes, full)


def _rounded(preset: Quantisation, v: DoubleDouble) -> Array:
    """Each number, rounded to one of the element, which exist beyond its largest where codes do not saturate."""
    exact = round_to_odd(v.hi, v.lo)  # on the same side of every tie
    mantissa, least, largest = FORMATS[preset.element]
    size = np.minimum(np.abs(exact), 2.0**40)  # far beyond all codes; an integer of no last eight bits
    step = np.ldexp(1.0, np.maximum(np.frexp(size)[1] - 1, least) - mantissa)
    below = np.floor(size / step)
    rest, is_odd = size / step - below, below % 2 == 1
    up = {
        "half_even": (rest > 0.5) | ((rest == 0.5) & is_odd),
        "half_away": rest >= 0.5,
        "half_down": rest > 0.5,
        "truncate": np.zeros_like(is_odd),
    }[preset.rounding]
    size = (below + up) * step
    if preset.overflow == "saturate":
        size = np.minimum(size, np.where(np.signbit(exact), -preset.qmin, preset.qmax))
    elif preset.overflow == "nan":
        size = np.where(size > largest, np.inf, size)
    of_nan = {"nan": np.nan, "qmax": preset.qmax, "zero": 0.0}[preset.nan]
    return np.where(np.isnan(exact), of_nan, np.copysign(size, exact))


def in_format(numbers: Array, name: str) -> Array:
    """Numbers of a format in its dtype: infinity is its NaN where it has none, and an integer keeps its last bits."""
    if name == "int8":
        return numbers.astype(np.int64).astype(np.int8)
    return np.where(np.isinf(numbers) & (name in ("e4m3fn", "e4m3fnuz")), np.nan, numbers).astype(dtype_of(name))
