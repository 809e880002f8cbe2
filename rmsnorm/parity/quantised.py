"""Compares a function that normalises and quantises with what some y of the interval that is right for y gives.

The golden's steps grow with |y|. So the two ends of y give those of g and of the scales, and those of the codes too,
for the scales that the function itself returned: one scale that another order of a sum has moved makes no row wrong.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.accuracy.bounds import arithmetic_of, operations_of
from rmsnorm.accuracy.rounding import cast
from rmsnorm.numpy_impl.quantised import Steps, dtype_of, in_format
from rmsnorm.parity.asking import questions
from rmsnorm.parity.cases import Array
from rmsnorm.parity.checking import dtypes_named
from rmsnorm.parity.comparison import Comparison, Run, Skip, labelled, version_of
from rmsnorm.parity.judge import failed
from rmsnorm.parity.report import Report
from rmsnorm.specification import errors
from rmsnorm.specification.dtypes import unit_roundoff
from rmsnorm.specification.quantisation import QUANTISATIONS, Quantisation, choices
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import NoTarget, Target, TargetError, open_target
from rmsnorm.targets.calling import with_values
from rmsnorm.targets.limits import Limits
from rmsnorm.targets.locate import locate
from rmsnorm.targets.target import random_state_kept

_NORM: Final = Variant.get("standard").replace(eps=1e-3)
_DESIGN: Final = {  # the levels of the judge's design that are asked, and of all other factors the usual one
    "rows": ("1 row", "few rows"), "width": ("128", "1024"), "axes": ("2 axes",), "gain": ("gain of x's dtype",),
    "eps": ("eps of the variant",), "layout": ("contiguous",), "gain's memory": ("dense gain",), "mode": ("plain",),
    "history": ("first call",),
    "values": ("normal", "heavy tails", "large", "small", "a row of zeros", "NaN in a row", "infinity in a row"),
}  # fmt: skip
# The largest elements of a block: both sides of ties and of powers of two, where kernels were reported to differ.
_LARGEST: Final = (3.0625, 3.875, 3.765625, 2.03125, 300, 449, 480, 496, 511, 600, 8 - 2.0**-21, 2.0**-9 + 2.0**-31)
_STATIC: Final = (0.01, 0.013, 7 / 512, 3.0625 / 448)
_SIZES: Final = (0.0, 2.0**-10, 2.0**-12, 1e-5, 1e-11, 1e-35, 6e-38, 1e-40)  # of an element of y, beside zeros
_COLUMN: Final = (math.nan, math.inf, -math.inf, -0.0, -1e-3, -1000.0)  # of the gain, beside ones
_GRID: Final = np.outer(2.0 ** -np.arange(6), 0.5 + np.arange(128) / 256).ravel()  # numbers of eight bits


class Asked(NamedTuple):
    """A call: its arrays, its scales, whether 1 / rho is exact, and the relative error of the product with 1 / s."""

    name: str
    x: Array
    gain: Any
    residual: Array | None
    scales: dict[str, float]
    eps: Any = 0.25
    is_exact: bool = True
    slack: float = 0.0


@random_state_kept()
def check_quantised(
    function: Any,
    quantisation: str | Quantisation,
    *,
    framework: str | None = None,
    dtypes: Sequence[str] | str | None = None,
    device: str = "cpu",
    init: Mapping[str, Any] | None = None,
    reciprocal_slack: float = 0.0,
) -> Report:
    """Compare a function that normalises and quantises with the golden.

    It is called as f(x, scale, eps=..., residual=..., static_scale=..., global_scale=...), with the options that it
    takes and the quantisation needs, and returns q, the scales unless they are static, g if it computes it, and h if
    it takes a residual. uint8 is codes, one in a byte, or for E2M1 two, the first in the low half.

    Args:
        function: of x, the gain and options.
        quantisation: what it should be: a preset of ``Quantisation``, or another one.
        framework, dtypes, device, init: as of ``check``.
        reciprocal_slack: the relative error of the reciprocal of a scale, if a kernel approximates it.

    Raises:
        ValueError: there is no such quantisation or dtype, or the function does not take what it needs.

    Example:
        >>> from rmsnorm.numpy_impl import rms_norm_quantised
        >>> def norm(x, scale, eps, static_scale):
        ...     q, *_ = rms_norm_quantised(x, scale, eps=eps, static_scale=static_scale, quantisation="vllm.static")
        ...     return q
        >>> check_quantised(norm, "vllm.static", dtypes="bfloat16").passed
        True
    """
    preset, types = Quantisation.get(quantisation, "check_quantised"), dtypes_named(dtypes)
    located, began = locate(function) if isinstance(function, str) else function, time.monotonic()

    def opened(scales: Mapping[str, float], library: str | None) -> Target:
        options = {**(init or {}), **scales}
        return open_target(located, framework=library, init=options, device=device, op="check_quantised")

    target = opened(_scales_of(preset), framework)
    name = function if isinstance(function, str) else target.name
    run = Run(target.framework, version=version_of(target.framework), device=device)
    if "eps" not in target.asks:
        want, fix = "a function f(x, scale, *, eps)", "write an adapter that takes eps by name"
        raise errors.out_of_domain("check_quantised", "function", name, want, fix)
    if "residual" not in target.arguments:
        run.skipped.append(Skip("h", "", "it takes no argument residual"))

    def judged(row: Quantisation) -> Iterator[tuple[str, str, list[Comparison]]]:
        try:
            for asked in _calls(opened(_scales_of(row), run.name), row, types):
                called = with_values(opened(asked.scales, run.name), optional=True, eps=asked.eps)
                yield asked.x.dtype.name, asked.name, _judged(called, row, asked, asked.slack + reciprocal_slack)
        except NoTarget as error:  # it lacks an option of another quantisation
            yield "", "", [failed("q", str(error))]

    def held(rows: Iterable[Quantisation]) -> list[str]:
        others = [row for row in rows if row != preset]
        return [row.label for row in others if all(one.passed for *_, every in judged(row) for one in every)]

    for dtype, case, comparisons in judged(preset):
        run.cases += 1
        run.records += labelled(comparisons, preset.name, dtype, case)
    run.conclude()
    if run.failures:
        near = held(QUANTISATIONS.values()) or held(_neighbours(preset))
        run.message = f"it is {' or '.join(near)}" if near else f"it is no preset, nor {preset.label} but for one field"
    run.seconds = time.monotonic() - began
    return Report(name, Variant.get("standard"), run, label=preset.label)


def _neighbours(preset: Quantisation) -> Iterator[Quantisation]:
    """Those that differ from it in one choice."""
    for name, value in ((name, value) for name, values in choices().items() for value in values):
        with contextlib.suppress(ValueError):  # which another field forbids
            yield preset.replace(**{name: value})


def _calls(target: Target, preset: Quantisation, types: Sequence[str]) -> Iterator[Asked]:
    """The rows of exact 1 / rho, and the questions of the design; with a residual where it must have one."""
    limited = replace(target, limits=Limits(multiple_of=math.lcm(preset.size, 64)))
    scales = _scales_of(preset, 0.013, 371.3)
    for dtype in types:
        for asked in _unit_rows(preset, dtype):
            yield asked._replace(residual=np.zeros_like(asked.x)) if "residual" in target.required else asked
        for _, question in questions(limited, _NORM, [dtype], gradients=False, group_size=None, only=_DESIGN):
            x, gain, residual = question.rows.x, question.rows.scale, question.rows.residual
            yield Asked(question.circumstance.name, x, gain, residual, scales, _NORM.eps, is_exact=False)
        if "residual" in target.arguments:  # one that is lost where the sum is rounded, so that y of the sum is larger
            sizes = 1 + np.arange(x.size).reshape(x.shape) % 7 / 8, np.full(x.shape, 0.75 * unit_roundoff(dtype))
            x, residual = (cast(np.where(x < 0, -size, size), dtype) for size in sizes)
            yield Asked("a lost residual", x, gain, residual, scales, _NORM.eps, is_exact=False)


def _scales_of(preset: Quantisation, static: float = 1.0, g: float = 1.0) -> dict[str, float]:
    """The scales that a call needs, as numbers of float32."""
    scales = {"static_scale": static} if preset.block == "static" else {}
    scales |= {"global_scale": g} if preset.global_scale == "given" else {}
    return {name: float(np.float32(number)) for name, number in scales.items()}


def _unit_rows(preset: Quantisation, dtype: str) -> Iterator[Asked]:
    """Rows whose 1 / rho is exactly 1, so that one wrong rounding, division or clamp shows without any tolerance.

    mean(x^2) is 3/4 and eps 1/4: in any order of the sum y is x times the gain, and every scale and code is known.
    """
    is_static, wide, few = preset.block == "static", math.lcm(preset.size, 1024), math.lcm(preset.size, 64)
    # What is not rounded after the scale is decided exactly by the golden; float32 rounds the product once.
    is_rounded = preset.round_scaled != "none" or preset.scale_format == "e8m0fnu"
    product = 0.0 if is_rounded else unit_roundoff("float32")

    def beside(top: float, values: Array) -> Array:
        """A gain of these values where x is not 0, and in each block the largest of them first."""
        gain = np.zeros(wide)
        gain[np.arange(wide) % 4 < 3] = np.resize(values, wide // 4 * 3)
        gain[:: preset.size if preset.size > 1 else wide] = top
        return gain

    def asked(name: str, gain: Array, s: float = 1.0, g: float = 1.0) -> Asked:
        signs = np.random.default_rng(len(gain)).choice([-1.0, 1.0], len(gain))
        signs[:4] = 1
        x = np.resize([1.0, 1.0, 1.0, 0.0], len(gain)) * signs
        arrays = cast(np.stack([x, -x]), dtype), cast(gain, dtype), None
        return Asked(name, *arrays, _scales_of(preset, s, g), slack=product)

    for s in (1.0, 2.0**-3):
        gain = beside(preset.qmax, _near_ties(preset, dtype)) * s
        yield asked(f"ties, a scale of {s:g}", gain, s)._replace(slack=0.0)
    tops = [(s, 1.0, math.ceil(math.log2(preset.qmax * s) + 0.1)) for s in _STATIC]
    for s, top, power in tops if is_static else [(1.0, top, math.floor(math.log2(top))) for top in _LARGEST]:
        yield asked(f"y beside {top:.4g}, a scale of {s:.4g}", beside(top, _GRID * 2.0**power), s, 0.7)
    one = np.arange(few) == 1
    for value in _COLUMN:
        yield asked(f"a gain of {value:g} in one column", np.where(one, value, 1.0))
    for size in (size for size in _SIZES if size == 0 or cast(np.asarray(size), dtype) != 0):
        yield asked(f"y of {size:.3g} once", np.where(one, size, 0.0))


def _near_ties(preset: Quantisation, dtype: str) -> Array:
    """The middles between two numbers of the element, what is next to them, and what is beyond the last."""
    codes = np.arange(16 if preset.element == "e2m1fn" else 256).astype(np.uint8)
    numbers = codes.view(dtype_of(preset.element)).astype(np.float64)
    numbers = np.unique(numbers[np.isfinite(numbers) & (numbers >= 0)])
    middles, away = (numbers[1:] + numbers[:-1]) / 2, 4 * unit_roundoff(dtype)
    values = np.concatenate([middles, middles * (1 - away), middles * (1 + away)])
    beyond = [1.01, 1.03, 464 / 448, 1.05, 1.25, 2, 8] if preset.block == "static" else []
    return np.append(values[values <= preset.qmax], preset.qmax * np.array(beyond))


def _judged(target: Target, preset: Quantisation, asked: Asked, slack: float) -> list[Comparison]:
    steps = Steps(asked.x, asked.gain, asked.residual, asked.eps, preset, **asked.scales)
    wanted = steps.outputs()
    wanted["q"] = in_format(wanted["q"], preset.element)
    if preset.block == "static":
        del wanted["scales"]
    try:
        got = _read(target, asked, wanted)
    except TargetError as error:
        return [failed("q", str(error))]
    # The roundings of float32 that reach y: k for a sum of k terms, in any order.
    roundings = 0 if asked.is_exact else operations_of("y", steps.call, worst=True)
    most = roundings * unit_roundoff(arithmetic_of(steps.call))
    first, second = (steps.outputs(got, sign * most, sign * slack) for sign in (-1, 1))
    if preset.overflow == "wrap":  # beside the code, as many are equal to it
        least, largest = np.minimum(first["q"], second["q"]), np.maximum(first["q"], second["q"])
        turns = 256 * np.ceil((least - got["q"]) / 256)
        first["q"], second["q"] = least - turns + 0.0, largest - turns + 0.0
    else:
        first["q"], second["q"] = (in_format(end["q"], preset.element) for end in (first, second))
    return [_comparison(name, array, wanted[name], first[name], second[name]) for name, array in got.items()]


def _read(target: Target, asked: Asked, wanted: Mapping[str, Array]) -> dict[str, Array]:
    """The numbers that it returns, each with the dtype and shape that are wanted.

    Raises:
        TargetError: it raised or wrote to an input; or an output is missing, or has another dtype or shape.
    """
    arrays = {"x": asked.x, "scale": asked.gain, "residual": asked.residual}
    result = target.called({name: array for name, array in arrays.items() if array is not None}).result
    outputs, kind = result if isinstance(result, (tuple, list)) else (result,), target.bridge.array
    if target.touched:
        raise TargetError(f"inputs written to: {', '.join(sorted(target.touched))}")
    if not isinstance(outputs[0], kind):
        raise TargetError(f"q is a {type(outputs[0]).__name__}, expected {kind.__module__}.{kind.__qualname__}")
    if len(outputs) != len(wanted):
        raise TargetError(f"{len(outputs)} outputs, expected {', '.join(wanted)}; write an adapter that returns these")
    read = {}
    for got, (name, want) in zip(map(target.bridge.fetch, outputs), wanted.items(), strict=True):
        came, is_byte = errors.describe(got.shape, got.dtype.name), want.dtype.itemsize == 1
        if got.dtype == np.uint8 and is_byte:
            if "float4" in want.dtype.name and got.size * 2 == want.size:  # the first of two is in the low half
                got = np.stack([got & 15, got >> 4], axis=-1).reshape(*got.shape[:-1], -1)
            got = np.ascontiguousarray(got).view(want.dtype)
        if name in ("scales", "g") and np.squeeze(got).shape == np.squeeze(want).shape:
            got = got.reshape(want.shape)
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            expected = errors.describe(want.shape, want.dtype.name) + ", or its codes in uint8" * is_byte
            raise TargetError(f"{name} is {came}, expected {expected}; write an adapter that returns this")
        read[name] = got.astype(np.float64)
    return read


def _comparison(name: str, got: Array, *expected: Array) -> Comparison:
    """Of numbers with the right one and the ends of their interval, which may be NaN beyond it."""
    value, *ends = (array.astype(np.float64) for array in expected)

    def equals(want: Array) -> Array:
        return ((got == want) & (np.signbit(got) == np.signbit(want))) | (np.isnan(got) & np.isnan(want))

    low, high = np.minimum(*ends), np.maximum(*ends)
    fits = equals(ends[0]) | equals(ends[1]) | ((low < got) & (got < high))
    if np.all(fits):
        same = equals(value)
        return Comparison(name, 0.0, 0.0, float(np.mean(same)), float(not np.all(same)), True, "")
    index = tuple(map(int, np.unravel_index(np.argmin(fits), fits.shape)))
    want = " to ".join(dict.fromkeys(repr(float(end[index])) for end in (low, high)))
    wrong = f"{np.sum(~fits)} of {fits.size} are wrong"
    return failed(name, f"at {index} it is {float(got[index])!r}, expected {want}; {wrong}")
