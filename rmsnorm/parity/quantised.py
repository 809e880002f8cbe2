"""Compares a function that normalises and quantises with the golden, in a chain: h, then g, the scales and the codes.

Each step is judged by what the function itself returned before it, so that one scale that another order of a sum has
moved does not make a row wrong. y is never asked for.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from rmsnorm.accuracy.rounding import cast
from rmsnorm.numpy_impl import allowed, rms_norm_quantised
from rmsnorm.parity.cases import Array
from rmsnorm.parity.checking import dtypes_named
from rmsnorm.parity.comparison import Comparison, Run, Skip, labelled
from rmsnorm.parity.judge import failed
from rmsnorm.parity.kernel import Kernel
from rmsnorm.parity.quantised_cases import Case, cases_of
from rmsnorm.parity.report import Report
from rmsnorm.specification import errors
from rmsnorm.specification.quantisation import QUANTISATIONS, Quantisation, choices, get_quantisation
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import TargetError
from rmsnorm.targets.target import random_state_kept

_F32: Final = 2.0**-24  # unit roundoff


@dataclass(frozen=True, repr=False)
class QuantisedReport(Report):
    """The result of ``check`` with a quantisation. ``variant`` is the norm before it.

    Attributes:
        quantisation: what it was compared with.
        counts: of all codes, how many are the ``same`` as the golden's, a ``tie`` whose other code it has, or
            ``wrong``; how many ``rows`` there were, and of how many the scale ``moved`` within what is allowed.
        instead: the presets of which no code, scale or h is wrong, for a function that is not the one asked for.
    """

    quantisation: Quantisation = field(kw_only=True)
    counts: Mapping[str, int] = field(kw_only=True)
    instead: tuple[str, ...] = field(kw_only=True, default=())

    @property
    def _counts(self) -> list[str]:
        counts = Counter(self.counts)
        codes = ", ".join(f"{counts[name]} {name}" for name in ("same", "tie", "wrong"))
        return [f"codes: {codes}; the scale of {counts['moved']} of {counts['rows']} rows moved"]


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
) -> QuantisedReport:
    """Compare a function that normalises and quantises with the golden.

    It is called as f(x, scale, eps=..., residual=..., static_scale=..., global_scale=...), with the options that it
    takes and the quantisation needs, and returns q, the scales unless they are static, g if it computes it, and h if
    it takes a residual. uint8 is codes, one in a byte, or for E2M1 two, the first in the low half.

    Args:
        function: of x, the gain and options.
        quantisation: what it should be: a preset of ``Quantisation``, or another one.
        framework, dtypes, device, init: as of ``check``.
        reciprocal_slack: the relative error of the reciprocal of a scale, where a kernel approximates it.

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
    preset, types = get_quantisation("check_quantised", quantisation), dtypes_named(dtypes)
    kernel = Kernel(function, framework, device, init or {})
    if lacks := kernel.lacks(preset):
        want = f"a function f(x, scale, *, {', '.join(lacks)}) for {preset.name}"
        raise errors.out_of_domain(
            "check_quantised", "function", kernel.name, want, "write an adapter that takes them by name"
        )
    began, run = time.monotonic(), Run("", device=kernel.device)
    if not kernel.takes("residual"):
        run.skipped.append(Skip("h", "", "it takes no argument residual"))
    counts: Counter[str] = Counter()
    for dtype, case, comparisons, counted in _judged(kernel, preset, types, reciprocal_slack):
        run.cases += 1
        run.records += labelled(comparisons, preset.name, dtype, case.name)
        counts += counted
    kernel.conclude(run)
    instead: tuple[str, ...] = ()
    if run.failures:
        others = [row for row in QUANTISATIONS.values() if row != preset]
        instead = tuple(row.label for row in _computed(kernel, others, types, reciprocal_slack))
        near = instead or [row.label for row in _computed(kernel, _neighbours(preset), types, reciprocal_slack)]
        run.message = f"it is {' or '.join(near)}" if near else f"it is no preset, nor {preset.label} but for one field"
    run.seconds = time.monotonic() - began
    norm = Variant.get("standard")
    return QuantisedReport(
        kernel.name, norm, run, label=preset.label, quantisation=preset, counts=dict(counts), instead=instead
    )


def _computed(
    kernel: Kernel, candidates: Iterable[Quantisation], types: Sequence[str], reciprocal_slack: float
) -> list[Quantisation]:
    """Those of the candidates of which the function returns no wrong code, scale or h."""
    judged = [(row, _judged(kernel, row, types, reciprocal_slack)) for row in candidates if not kernel.lacks(row)]
    return [row for row, calls in judged if all(c.passed for _, _, comparisons, _ in calls for c in comparisons)]


def _neighbours(preset: Quantisation) -> Iterator[Quantisation]:
    """Those that differ from it in one choice."""
    known: dict[str, Sequence[Any]] = {**choices(), "round_norm": (True, False), "round_gain": (True, False)}
    for name, values in known.items():
        for value in values:
            if value != getattr(preset, name):
                with contextlib.suppress(ValueError):  # which another field forbids
                    yield preset.replace(**{name: value})


def _judged(
    kernel: Kernel, preset: Quantisation, types: Sequence[str], reciprocal_slack: float
) -> Iterator[tuple[str, Case, list[Comparison], Counter[str]]]:
    for dtype in types:
        for case in cases_of(preset, dtype, residual=kernel.takes("residual"), always=kernel.needs_residual):
            case = case._replace(reciprocal_slack=case.reciprocal_slack + reciprocal_slack)
            comparisons, counts = _compare(kernel, preset, case)
            yield dtype, case, comparisons, counts


class _Outputs(NamedTuple):
    """What a function returned: the numbers of its codes, its scales in float32, g and h."""

    q: Array
    scales: Array
    g: Array | None
    h: Array | None


def _read(preset: Quantisation, case: Case, arrays: Sequence[Array]) -> _Outputs:
    """The outputs by their place: q, scales, g where the call computes it, h where it has a residual.

    Raises:
        TargetError: one is missing, or has another shape or dtype.
    """
    shape, left = case.x.shape, list(arrays[1:])
    blocks = shape[-1] // preset.block if isinstance(preset.block, int) else 1
    own_g, has_h, is_static = preset.global_scale == "amax", case.residual is not None, preset.block == "static"
    names = ["q", *([] if is_static else ["scales"]), *(["g"] if own_g else []), *(["h"] if has_h else [])]
    static = np.asarray(case.options.get("static_scale", 1.0), np.float32)
    if is_static and left and left[0].size == 1 and shape != left[0].shape:  # which a kernel need not return
        static = left.pop(0).reshape(())
    if len(left) != len(names) - 1:
        raise TargetError(f"{len(arrays)} outputs, expected {', '.join(names)}; write an adapter that returns these")
    scales = static if is_static else _numbers("scales", preset.scale_format, left.pop(0), (*shape[:-1], blocks))
    g = left.pop(0).astype(np.float32) if own_g else None
    q = _numbers("q", preset.element, arrays[0], shape)
    if g is not None and g.size != 1:
        raise TargetError(f"g is {_described(g)}, expected one number; write an adapter")
    return _Outputs(q, scales.astype(np.float32), g, left.pop(0) if has_h else None)


def _numbers(name: str, element: str, codes: Array, shape: tuple[int, ...]) -> Array:
    """The numbers of an output in float64. uint8 is codes, and for E2M1 also two in a byte, the first in its low half.

    A scale may also be a number in a wider dtype than its format.
    """
    full = f"float{4 if element.startswith('e2m1') else 8}_{element}" if element.startswith("e") else element
    dtype = np.dtype(getattr(ml_dtypes, full, full))
    if codes.dtype == np.uint8 and dtype.itemsize == 1:
        if element == "e2m1fn" and codes.shape == (*shape[:-1], shape[-1] // 2):
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(shape)
        codes = np.ascontiguousarray(codes).view(dtype)
    if codes.shape == shape[:-1] and shape[-1] == 1:
        codes = codes[..., None]
    wider = name == "scales" and codes.dtype in (np.float32, np.float64)
    if codes.shape != shape or not (codes.dtype == dtype or wider):
        or_codes = ", or its codes in uint8" if dtype.itemsize == 1 else ""
        want = f"{errors.describe(shape, dtype.name)}{or_codes}"
        raise TargetError(f"{name} is {_described(codes)}, expected {want}; write an adapter that returns this")
    return codes.astype(np.float64)


def _described(array: Array) -> str:
    return errors.describe(array.shape, array.dtype.name)


def _compare(kernel: Kernel, preset: Quantisation, case: Case) -> tuple[list[Comparison], Counter[str]]:
    known: dict[str, Any] = {"residual": case.residual, "eps": case.eps, "quantisation": preset}
    _, scales, *rest = rms_norm_quantised(case.x, case.gain, **known | case.options)
    try:
        got = _read(preset, case, kernel.call(case))
    except TargetError as error:
        return [failed("q", str(error))], Counter()
    comparisons, g = [], case.options.get("global_scale")
    ends: list[Array] = [scales.astype(np.float32)] * 2
    inexact = case.slack and preset.block != "static"
    stored = case.x if case.residual is None else rest[-1]
    amaxes = [_largest(preset, case, stored, e * (case.slack + 2.0**-40)) for e in (-1, 1)] if inexact else []
    if got.h is not None:
        comparisons.append(_inside("h", got.h, stored, stored))
    if got.g is not None:
        of_ends = [_scales_of(preset, a.max(), None)[1] for a in reversed(amaxes)] or [rest[0]] * 2
        comparisons.append(_inside("g", got.g.reshape(()), *of_ends))
        g = float(got.g.ravel()[0]) if got.g.ravel()[0] > 0 else float(rest[0])
    if inexact:
        ends = [_scales_of(preset, a, g)[0] for a in amaxes]
    comparisons.append(_inside("scales", got.scales, *ends))
    want = scales.astype(np.float32)
    moved = np.any(~_between(got.scales, want, want) & _between(got.scales, *ends), axis=-1)
    known |= {"global_scale": g} if preset.global_scale != "none" else {}
    both = exact = allowed(case.x, case.gain, got.scales, slack=0.0, **known)
    if case.slack or case.reciprocal_slack:
        known["reciprocal_slack"] = case.reciprocal_slack
        both = allowed(case.x, case.gain, got.scales, slack=case.slack, **known)
    same, fits = (_is_code(preset, got.q, *interval) for interval in (exact, both))
    fits |= same
    counts = Counter(
        same=int(np.sum(same)), tie=int(np.sum(fits & ~same)), wrong=int(np.sum(~fits)), rows=len(case.x),
        moved=int(np.sum(moved)),
    )  # fmt: skip
    detail = ""
    if counts["wrong"]:
        index = _first(~fits)
        low, high = (end[index] for end in both)
        expected = f"{low:g}" if low == high or np.isnan(low) else f"{low:g} or {high:g}"
        detail = f"at {index} it is {got.q[index]:g}, expected {expected}; {counts['wrong']} of {fits.size} codes are "
        detail += f"wrong, {counts['tie']} are ties"
    return [*comparisons, _comparison("q", same, fits, detail)], counts


def _comparison(name: str, same: Array, fits: Array, detail: str) -> Comparison:
    passed = bool(np.all(fits))
    apart = math.inf if not passed else float(not np.all(same))
    return Comparison(name, 0.0 if passed else math.inf, 0.0, float(np.mean(same)), 0.0, apart, passed, detail)


def _inside(name: str, got: Array, low: Array, high: Array) -> Comparison:
    """Whether an output is in the interval that is allowed, and of the right shape, h also of the right dtype."""
    if got.shape != low.shape or (name == "h" and got.dtype != low.dtype):
        return failed(name, f"{_described(got)}, expected {_described(low)}; write an adapter that returns this")
    fits, detail = _between(got, low, high), ""
    if not np.all(fits):
        index = _first(~fits)
        number, *ends = (float(array[index]) for array in (got, low, high))
        want = f"{ends[0]!r}" if ends[0] == ends[1] or math.isnan(ends[0]) else f"from {ends[0]!r} to {ends[1]!r}"
        detail = f"at {index} it is {number!r}, expected {want}; {np.sum(~fits)} of {fits.size} are wrong"
    return _comparison(name, fits, fits, detail)


def _between(got: Array, low: Array, high: Array) -> Array:
    got, low, high = (array.astype(np.float64) for array in (got, low, high))
    return np.asarray(((low <= got) & (got <= high)) | (np.isnan(got) & np.isnan(low)))


def _is_code(preset: Quantisation, got: Array, low: Array, high: Array) -> Array:
    """Whether the codes are in an interval of ``allowed``: also the sign of a zero that has one."""
    with np.errstate(invalid="ignore"):
        fits = _between(got, low, high)
        if preset.overflow == "wrap":
            fits |= (got - low) % 256 <= high - low
        elif preset.overflow == "nan" and preset.element != "e5m2":  # which has an infinity
            fits |= np.isnan(got) & (np.isinf(low) | np.isinf(high))
    is_signed = preset.element not in ("int8", "e4m3fnuz")
    zero = (got == 0) & (low == 0) & (high == 0)
    return np.asarray(fits & ~(zero & (np.signbit(got) != np.signbit(low))) if is_signed else fits)


def _first(wrong: Array) -> tuple[int, ...]:
    return tuple(int(entry) for entry in np.argwhere(wrong)[0]) if wrong.ndim else ()


def _largest(preset: Quantisation, case: Case, stored: Array, error: float) -> Array:
    """float32(max |y|) of each block, for a 1 / rho with a relative error that is far above those of float64."""
    x, kept, gain = (array.astype(np.float64) for array in (case.x, stored, case.gain))
    total = x if case.residual is None else x + case.residual.astype(np.float64)
    read = total if preset.statistic_reads == "sum" else kept
    inverse = (1 + error) / np.sqrt(np.mean(read * read, axis=-1, keepdims=True) + case.eps)
    gain = gain + (preset.offset != "none")
    if preset.offset == "rounded":
        gain = cast(gain, case.gain.dtype.name).astype(np.float64)
    y = total if preset.values_read == "sum" else kept
    for step in ("norm", "gain") if preset.order == "norm_first" else ("gain", "norm"):
        y = y * (inverse if step == "norm" else gain)
        if preset.round_norm if step == "norm" else preset.round_gain:
            y = cast(y, case.x.dtype.name).astype(np.float64)
    size = preset.block if isinstance(preset.block, int) else x.shape[-1]
    sizes = cast(np.abs(y), "float32").reshape(len(x), -1, size).max(axis=2)
    return np.asarray(np.maximum(sizes, np.float32(preset.amax_floor)))


def _scales_of(preset: Quantisation, amax: Array, g: float | None) -> tuple[Array, ...]:
    """The scale of each amax, and g where it is computed: those of a row of ones and this gain, in blocks of one."""
    of_one = preset.replace(block=1, offset="none", global_scale=preset.global_scale if g is None else "given")
    gain = np.asarray(amax, np.float32).ravel()
    _, scales, *rest = rms_norm_quantised(np.ones_like(gain), gain, eps=0.0, quantisation=of_one, global_scale=g)
    return scales.astype(np.float32).reshape(np.shape(amax)), *rest
