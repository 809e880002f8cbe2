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
from typing import Any, Final

import numpy as np

from rmsnorm.accuracy.bounds import arithmetic_of, operations_of
from rmsnorm.accuracy.rounding import cast
from rmsnorm.numpy_impl.quantised import Steps, in_format, rms_norm_quantised
from rmsnorm.parity.asking import questions
from rmsnorm.parity.cases import Array
from rmsnorm.parity.checking import dtypes_named
from rmsnorm.parity.comparison import Comparison, Run, Skip, labelled, version_of
from rmsnorm.parity.judge import failed
from rmsnorm.parity.quantised_rows import Asked, scales_of, unit_rows
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

    target = opened(scales_of(preset), framework)
    name = function if isinstance(function, str) else target.name
    run = Run(target.framework, version=version_of(target.framework), device=device)
    if "eps" not in target.asks:
        want, fix = "a function f(x, scale, *, eps)", "write an adapter that takes eps by name"
        raise errors.out_of_domain("check_quantised", "function", name, want, fix)
    if "residual" not in target.arguments:
        run.skipped.append(Skip("h", "", "it takes no argument residual"))

    def judged(row: Quantisation) -> Iterator[tuple[str, str, list[Comparison]]]:
        try:
            for asked in _calls(opened(scales_of(row), run.name), row, types):
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
    limits, scales = Limits(multiple_of=math.lcm(preset.size, 64)), scales_of(preset, 0.013, 371.3)
    for dtype in types:
        for asked in unit_rows(preset, dtype):
            yield asked._replace(residual=np.zeros_like(asked.x)) if "residual" in target.required else asked
        limited = replace(target, limits=limits)
        for _, question in questions(limited, _NORM, [dtype], gradients=False, group_size=None, only=_DESIGN):
            x, gain, residual = question.rows.x, question.rows.scale, question.rows.residual
            yield Asked(question.circumstance.name, x, gain, residual, scales, _NORM.eps, is_exact=False)
        if (
            "residual" in target.arguments
        ):  # which is lost where x + residual is rounded, so that y of the sum is larger
            sizes = 1 + np.arange(x.size).reshape(x.shape) % 7 / 8, np.full(x.shape, 0.75 * unit_roundoff(dtype))
            x, residual = (cast(np.where(x < 0, -size, size), dtype) for size in sizes)
            yield Asked("a lost residual", x, gain, residual, scales, _NORM.eps, is_exact=False)


def _judged(target: Target, preset: Quantisation, asked: Asked, slack: float) -> list[Comparison]:
    options: dict[str, Any] = {"eps": asked.eps, "quantisation": preset, **asked.scales}
    golden = rms_norm_quantised(asked.x, asked.gain, residual=asked.residual, **options)
    names = ["q", "scales", *["g"] * (preset.global_scale == "amax"), *["h"] * (asked.residual is not None)]
    wanted = dict(zip(names, map(np.asarray, golden), strict=True))
    static = {"scales": wanted.pop("scales")} if preset.block == "static" else {}
    try:
        got = _read(wanted, _outputs(target, asked))
    except TargetError as error:
        return [failed("q", str(error))]
    steps = Steps(asked.x, asked.gain, asked.residual, **options)
    # The roundings of float32 that reach y: k for a sum of k terms, in any order.
    most = operations_of("y", steps.call, worst=True) * unit_roundoff(arithmetic_of(steps.call))
    ends = _ends(steps, {**static, **got}, 0.0 if asked.is_exact else most, slack)
    return [_comparison(name, array, wanted[name], *ends[name]) for name, array in got.items()]


def _outputs(target: Target, asked: Asked) -> list[Array]:
    """What it returns, as NumPy arrays."""
    arrays = {"x": asked.x, "scale": asked.gain, "residual": asked.residual}
    result = target.called({name: array for name, array in arrays.items() if array is not None}).result
    outputs, kind = result if isinstance(result, (tuple, list)) else (result,), target.bridge.array
    if target.touched:
        raise TargetError(f"inputs written to: {', '.join(sorted(target.touched))}")
    if not isinstance(outputs[0], kind):
        raise TargetError(f"q is a {type(outputs[0]).__name__}, expected {kind.__module__}.{kind.__qualname__}")
    return [target.bridge.fetch(tensor) for tensor in outputs]


def _read(wanted: Mapping[str, Array], arrays: Sequence[Array]) -> dict[str, Array]:
    """The numbers of the outputs, each with the dtype and shape that are wanted.

    Raises:
        TargetError: one is missing, or has others.
    """
    if len(arrays) != len(wanted):
        raise TargetError(f"{len(arrays)} outputs, expected {', '.join(wanted)}; write an adapter that returns these")
    read = {}
    for got, (name, want) in zip(arrays, wanted.items(), strict=True):
        came, is_byte = errors.describe(got.shape, got.dtype.name), want.dtype.itemsize == 1
        if got.dtype == np.uint8 and is_byte:
            if "float4" in want.dtype.name and got.size * 2 == want.size:  # the first of two is in the low half
                got = np.stack([got & 15, got >> 4], axis=-1).reshape(*got.shape[:-1], -1)
            got = np.ascontiguousarray(got).view(want.dtype)
        if name in ("scales", "g") and np.squeeze(got).shape == np.squeeze(want).shape:
            got = got.reshape(want.shape)
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            codes = ", or its codes in uint8" * is_byte
            expected = errors.describe(want.shape, want.dtype.name)
            raise TargetError(f"{name} is {came}, expected {expected}{codes}; write an adapter that returns this")
        read[name] = got.astype(np.float64)
    return read


def _ends(steps: Steps, got: Mapping[str, Array], error: float, slack: float) -> dict[str, tuple[Array, Array]]:
    """The least and the greatest of each output by what the function returned before it, where 1 / rho may err."""
    with np.errstate(all="ignore"):
        least_y = steps.y(error=-error)
        ys = least_y, steps.y(error=error) if error else least_y
        amaxes = [steps.amax(y) for y in ys]
        most_g, least_g = (steps.g(amax) for amax in amaxes)
        g = got["g"].astype(np.float32) if "g" in got and got["g"] > 0 else most_g
        (least, low), (most, high) = (steps.scales(amax, g) for amax in amaxes)
        own = np.broadcast_to(got.get("scales", low).astype(np.float32), least.shape)
        divisors = (own, own) if steps.preset.quantise_with == "stored" else (most, least)
        codes = [steps.codes(ys[end], divisors[end], g, (-slack, slack)[end]) for end in (0, 1)]
        q = [end(*codes) for end in (np.minimum, np.maximum)]
        if steps.preset.overflow == "wrap":  # beside the code, as many are equal to it
            turns = 256 * np.ceil((q[0] - got["q"]) / 256)
            q = [end - turns + 0.0 for end in q]
        else:
            q = [in_format(end, steps.preset.element) for end in q]
        h = steps.stored()
    return {"h": (h, h), "g": (least_g, most_g), "scales": (low, high), "q": (q[0], q[1])}


def _comparison(name: str, got: Array, *expected: Array) -> Comparison:
    """Of numbers with the right one and the ends of their interval, which may be NaN beyond it."""
    value, low, high = (np.asarray(array).astype(np.float64) for array in expected)
    same, is_low, is_high = (
        ((got == end) & (np.signbit(got) == np.signbit(end))) | (np.isnan(got) & np.isnan(end))
        for end in (value, low, high)
    )
    fits = is_low | is_high | ((low < got) & (got < high))
    if np.all(fits):
        return Comparison(name, 0.0, 0.0, float(np.mean(same)), float(not np.all(same)), True, "")
    index = tuple(int(entry) for entry in np.argwhere(~fits)[0]) if fits.ndim else ()
    number, least, most = (float(array[index]) for array in (got, low, high))
    want = f"{least!r}" if least == most or math.isnan(least) else f"from {least!r} to {most!r}"
    return failed(name, f"at {index} it is {number!r}, expected {want}; {np.sum(~fits)} of {fits.size} are wrong")
