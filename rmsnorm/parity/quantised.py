"""Compares a function that normalises and quantises with what some y of the interval that is right for y gives.

That of h is one number. Those of g and of the scales are of the two ends of y, and those of the codes too, for the
scales that the function itself returned: so one scale that another order of a sum has moved does not make a row wrong.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np

from rmsnorm.accuracy.bounds import arithmetic_of, operations_of
from rmsnorm.numpy_impl.quantised import Steps, dtype_of, in_format
from rmsnorm.parity.cases import Array
from rmsnorm.parity.checking import dtypes_named
from rmsnorm.parity.comparison import Comparison, Run, Skip, labelled, version_of
from rmsnorm.parity.judge import failed
from rmsnorm.parity.quantised_cases import Case, cases_of, scales_of
from rmsnorm.parity.report import Report
from rmsnorm.specification import dtypes as formats
from rmsnorm.specification import errors
from rmsnorm.specification.quantisation import QUANTISATIONS, Quantisation, choices, get_quantisation
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import Target, TargetError
from rmsnorm.targets.arguments import argument_names, required_options
from rmsnorm.targets.bridges import bridge
from rmsnorm.targets.locate import locate
from rmsnorm.targets.open import framework_name, name_of
from rmsnorm.targets.target import random_state_kept

_LIBRARIES: Final = ("torch", "jax", "tensorflow", "numpy")
Ends = tuple[Array, Array]


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
        fix = "write an adapter that takes them by name"
        raise errors.out_of_domain("check_quantised", "function", kernel.name, want, fix)
    began, run = time.monotonic(), Run("", device=device)
    if not kernel.takes("residual"):
        run.skipped.append(Skip("h", "", "it takes no argument residual"))
    for dtype, case, comparisons in _judged(kernel, preset, types, reciprocal_slack):
        run.cases += 1
        run.records += labelled(comparisons, preset.name, dtype, case.name)
    run.name = next(iter(kernel.bridges))
    run.version = version_of(run.name)
    run.conclude()
    if run.failures:
        others = (row for row in QUANTISATIONS.values() if row != preset)
        near = _computed(kernel, others, types, reciprocal_slack)
        near = near or _computed(kernel, _neighbours(preset), types, reciprocal_slack)
        run.message = f"it is {' or '.join(near)}" if near else f"it is no preset, nor {preset.label} but for one field"
    run.seconds = time.monotonic() - began
    return Report(kernel.name, Variant.get("standard"), run, label=preset.label)


def _computed(kernel: Kernel, candidates: Iterable[Quantisation], types: Sequence[str], slack: float) -> list[str]:
    """Those of the candidates of which the function returns no wrong code, scale or h."""
    judged = [(row.label, _judged(kernel, row, types, slack)) for row in candidates if not kernel.lacks(row)]
    return [label for label, calls in judged if all(c.passed for _, _, comparisons in calls for c in comparisons)]


def _neighbours(preset: Quantisation) -> Iterator[Quantisation]:
    """Those that differ from it in one choice."""
    for name, value in ((name, value) for name, values in choices().items() for value in values):
        if value != getattr(preset, name):
            with contextlib.suppress(ValueError):  # which another field forbids
                yield preset.replace(**{name: value})


def _judged(
    kernel: Kernel, preset: Quantisation, types: Sequence[str], slack: float
) -> Iterator[tuple[str, Case, list[Comparison]]]:
    for dtype in types:
        for case in cases_of(preset, dtype, residual=kernel.takes("residual"), always=kernel.needs_residual):
            try:
                got = _read(preset, case, kernel.call(case))
            except TargetError as error:
                yield dtype, case, [failed("q", str(error))]
            else:
                yield dtype, case, _compare(preset, case, got, case.reciprocal_slack + slack)


def _compare(preset: Quantisation, case: Case, got: Mapping[str, Array], slack: float) -> list[Comparison]:
    steps = Steps(case.x, case.gain, case.residual, eps=case.eps, quantisation=preset, **case.options)
    # The roundings of float32 that reach y: k for a sum of k terms, in any order.
    error = operations_of("y", steps.call, worst=True) * formats.unit_roundoff(arithmetic_of(steps.call))
    exact = allowed = _intervals(steps, got, 0.0, 0.0)
    if slack or not case.is_exact:
        allowed = _intervals(steps, got, 0.0 if case.is_exact else error, slack)
    return [_comparison(name, array, exact[name], allowed[name]) for name, array in got.items()]


def _intervals(steps: Steps, got: Mapping[str, Array], error: float, slack: float) -> dict[str, Ends]:
    """The least and the greatest of each output by what the function returned before it, where 1 / rho may err."""
    with np.errstate(all="ignore"):
        ys = [steps.y(error=end) for end in sorted({-error, error})]  # one, where both ends are the same
        amaxes = [steps.amax(y) for y in ys]
        most_g, least_g = (steps.g(amaxes[end]) for end in (0, -1))
        g = got["g"].astype(np.float32) if "g" in got and got["g"] > 0 else most_g
        (least, low), (most, high) = (steps.scales(amaxes[end], g) for end in (0, -1))
        own = np.broadcast_to(got["scales"].astype(np.float32), least.shape)
        divisors = (own, own) if steps.preset.quantise_with == "stored" else (most, least)
        codes = [steps.numbers(ys[end], divisors[end], g, (-slack, slack)[end]) for end in (0, -1)]
        q = [in_format(end(*codes), steps.preset.element) for end in (np.minimum, np.maximum)]
        h = steps.stored()
    return {"h": (h, h), "g": (least_g, most_g), "scales": (low, high), "q": (q[0], q[1])}


def _fits(got: Array, low: Array, high: Array) -> Array:
    """Which numbers are in their interval. Its ends have the bits of the format: NaN beyond it, or wrapped integers."""
    got, low, high = (np.asarray(array).astype(np.float64) for array in (got, low, high))
    fits = (low < got) & (got < high)
    for end in (low, high):
        fits |= ((got == end) & (np.signbit(got) == np.signbit(end))) | (np.isnan(got) & np.isnan(end))
    return np.asarray(fits)


def _comparison(name: str, got: Array, exact: Ends, allowed: Ends) -> Comparison:
    same = _fits(got, *exact)
    fits, detail = same | _fits(got, *allowed), ""
    if not (passed := bool(np.all(fits))):
        index = tuple(int(entry) for entry in np.argwhere(~fits)[0]) if fits.ndim else ()
        number, low, high = (float(np.asarray(array)[index]) for array in (got, *allowed))
        want = f"{low!r}" if low == high or math.isnan(low) else f"from {low!r} to {high!r}"
        detail = f"at {index} it is {number!r}, expected {want}; {np.sum(~fits)} of {fits.size} are wrong"
    apart = math.inf if not passed else float(not np.all(same))
    return Comparison(name, 0.0 if passed else math.inf, 0.0, float(np.mean(same)), apart, passed, detail)


class Kernel:
    """A function of x, the gain and options, called with NumPy arrays in the library whose arrays it takes."""

    def __init__(self, function: Any, framework: str | None, device: str, init: Mapping[str, Any]) -> None:
        self.name = function if isinstance(function, str) else name_of(function)
        function = locate(function) if isinstance(function, str) else function
        if not callable(function) or isinstance(function, type):
            want = "a function of x, the gain and options"
            raise errors.wrong_type("check", "function", function, want, "wrap it in one")
        self.function = functools.partial(function, **init) if init else function
        self.names = argument_names(self.function)  # None for any: compiled code is called with all
        self.needs_residual = "residual" in required_options(self.function)
        self.bridges, missing = {}, None
        names = [getattr(value, "__name__", "") for value in getattr(function, "__globals__", {}).values()]
        near = {str(name).partition(".")[0] for name in names}  # the libraries that its module names come first
        loaded = sorted((name for name in _LIBRARIES if name in sys.modules), key=lambda name: name not in near)
        for name in [framework_name("check", framework)] if framework else loaded:
            try:
                self.bridges[name] = bridge(name, device)
            except errors.InputError as error:  # the library is not on that device
                missing = missing or error
        if not self.bridges and missing is not None:
            raise missing

    def takes(self, name: str) -> bool:
        return self.names is None or name in self.names

    def lacks(self, preset: Quantisation) -> list[str]:
        """The options of a call that it does not take."""
        return [name for name in ("eps", *scales_of(preset, 1.0, 1.0)) if not self.takes(name)]

    def call(self, case: Case) -> list[Array]:
        """What it returns, as NumPy arrays.

        Raises:
            TargetError: it raised, or returned what is no array.
        """
        options, refusals = {"eps": case.eps, **case.options}, []
        arrays = {"x": case.x, "scale": case.gain} | ({} if case.residual is None else {"residual": case.residual})

        def run(sent: Mapping[str, Any]) -> Any:
            return self.function(sent["x"], sent["scale"], **{name: sent[name] for name in [*sent][2:]}, **options)

        for name, opened in self.bridges.items():
            target = Target(self.name, name, opened, run)
            try:
                outputs = _fetched(target, target.called(arrays).result)
            except TargetError as error:
                refusals.append(error)
            else:
                self.bridges = {name: opened}
                return outputs
        raise refusals[0]


def _fetched(target: Target, result: Any) -> list[Array]:
    outputs, kind = result if isinstance(result, (tuple, list)) else (result,), target.bridge.array
    if target.touched:
        raise TargetError(f"inputs written to: {', '.join(sorted(target.touched))}")
    if not isinstance(outputs[0], kind):
        raise TargetError(f"q is a {type(outputs[0]).__name__}, expected {kind.__module__}.{kind.__qualname__}")
    fetched = []
    for tensor in outputs:
        name = str(getattr(tensor, "dtype", ""))
        is_float8 = name.startswith(("torch.float8", "torch.float4"))  # of which NumPy gets the bytes
        codes = target.bridge.fetch(tensor.view(sys.modules["torch"].uint8) if is_float8 else tensor)
        is_own = is_float8 and not name.endswith("x2")
        fetched.append(codes.view(getattr(ml_dtypes, name.removeprefix("torch."))) if is_own else codes)
    return fetched


def _read(preset: Quantisation, case: Case, arrays: list[Array]) -> dict[str, Array]:
    """The numbers of the outputs by their place: q, scales, g where the call computes it, h where it has a residual.

    Raises:
        TargetError: one is missing, or has another shape or dtype.
    """
    (rows, n), is_static = case.x.shape, preset.block == "static"
    blocks = n // preset.block if isinstance(preset.block, int) else 1
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {"q": (preset.element, (rows, n))}
    wanted |= {"scales": (preset.scale_format, () if is_static else (rows, blocks))}
    wanted |= {"g": ("float32", ())} if preset.global_scale == "amax" else {}
    wanted |= {"h": (case.x.dtype.name, (rows, n))} if case.residual is not None else {}
    if is_static and len(arrays) == len(wanted) - 1:  # which a kernel need not return
        arrays.insert(1, np.asarray(case.options["static_scale"], np.float32))
    if len(arrays) != len(wanted):
        names = ", ".join(name for name in wanted if name != "scales" or not is_static)
        raise TargetError(f"{len(arrays)} outputs, expected {names}; write an adapter that returns these")
    return {name: _numbers(name, array, *wanted[name]) for name, array in zip(wanted, arrays, strict=True)}


def _numbers(name: str, array: Array, element: str, shape: tuple[int, ...]) -> Array:
    """The numbers of an output. uint8 is codes, and for E2M1 also two in a byte, the first in its low half.

    A scale may also be a number in a wider dtype than its format.
    """
    dtype, got, is_scale = np.dtype(dtype_of(element)), array, name in ("scales", "g")
    if got.dtype == np.uint8 and dtype.itemsize == 1:
        if element == "e2m1fn" and got.shape == (*shape[:-1], shape[-1] // 2):
            got = np.stack([got & 15, got >> 4], axis=-1).reshape(shape)
        got = np.ascontiguousarray(got).view(dtype)
    if is_scale and [size for size in got.shape if size != 1] == [size for size in shape if size != 1]:
        got = got.reshape(shape)
    if got.shape != shape or not (got.dtype == dtype or (is_scale and got.dtype in (np.float32, np.float64))):
        or_codes = ", or its codes in uint8" if dtype.itemsize == 1 else ""
        came, want = errors.describe(array.shape, array.dtype.name), errors.describe(shape, dtype.name)
        raise TargetError(f"{name} is {came}, expected {want}{or_codes}; write an adapter that returns this")
    return got.astype(np.float64)
