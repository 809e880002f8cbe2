"""Compares anybody's function or layer with the golden, on the cases of the kit that it can be called with."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from rmsnorm import dtypes as formats
from rmsnorm import errors, page
from rmsnorm.accuracy.bounds import Bound
from rmsnorm.files import write_text
from rmsnorm.identify import Identity, identify
from rmsnorm.numpy_impl.arithmetic import add
from rmsnorm.parity.cases import Array, Case, Data, make, recast, select
from rmsnorm.parity.judge import Expected, Outcome, Verdict, compare, expect, failed
from rmsnorm.parity.report import html_parts, numbers
from rmsnorm.parity.run import BackendRun, Record
from rmsnorm.targets import Target, TargetError, open_target
from rmsnorm.variants import Preset, Variant, get_variant

_OF_THE_WIDTH: Final = ("wide", "width 1", "no columns")
_WIDEST: Final = (1, 16381)  # of the case "wide": an outlier is 127 times the RMS; a Triton kernel takes up to 16384
_SHOWN: Final = 5  # lines of failures in the text
_GATED: Final = "gate"  # the case for an optional gate; what the gate does is said by the variant
_GRADIENTS: Final = {"x": "dx", "scale": "dscale", "bias": "dbias", "gate": "dgate"}
_FIELDS: Final = 3  # lines on what it is instead


@dataclass(frozen=True, repr=False)
class Report:
    """The result of ``check``: printed, its ``text``; in a notebook, the page that ``write_html`` writes.

    Attributes:
        target: what was checked, opened.
        variant: what it was compared with.
        run: every comparison, as for a backend of ``rmsnorm check``; report.write_junit([run], path) writes it.
    """

    target: Target
    variant: Variant
    run: BackendRun

    @property
    def passed(self) -> bool:
        return not self.run.failures

    @cached_property
    def text(self) -> str:
        """One line if all comparisons held; otherwise the worst differences, and what ``identify`` says."""
        run, name = self.run, self.variant.label
        where = f"{run.name} {run.version} on {run.device}"
        if self.passed:
            return (
                f"{self.target.name} is {name}: all {len(run.records)} comparisons of {run.cases} cases held ({where})"
            )
        lines = [
            f"{self.target.name} is not {name}: {len(run.failures)} of {len(run.records)} comparisons differ ({where})"
        ]
        alike: dict[str, list[Record]] = {}
        for record in sorted(run.failures, key=lambda record: record.quantity != "y"):
            alike.setdefault(_kind(record), []).append(record)
        shown = list(alike.values())[:_SHOWN]
        lines += [_line(records[0]) for records in shown]
        if len(run.failures) > len(shown):
            lines.append(f"  and {len(run.failures) - len(shown)} more; details has them all")
        return "\n".join([*lines, "identify says:", *(f"  {line}" for line in self._instead())])

    @cached_property
    def details(self) -> str:
        """Every difference, and the whole report of ``identify``."""
        report = self._identity if isinstance(self._identity, str) else self._identity.text
        return "\n".join([*(_line(record) for record in self.run.failures), report])

    def _instead(self) -> list[str]:
        identity = self._identity
        if isinstance(identity, str):
            return [identity]
        return [*identity.differences(self.variant)[:_FIELDS], identity.headline]

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return page.fragment(*self._parts)

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page: the text, pictures of where the worst results differ, the table, the details."""
        write_text(Path(path), page.document(f"Is {self.target.name} {self.variant.label}?", *self._parts))

    @property
    def _parts(self) -> list[str]:
        more = [] if self.passed else [page.preformatted(self.details)]
        return [page.preformatted(self.text), *html_parts([self.run]), *more]

    @cached_property
    def _identity(self) -> Identity | str:
        try:
            return identify(self.target)
        except Exception as error:  # a failure of identify must not hide the differences
            return f"nothing: {type(error).__name__}: {error}"


def _line(record: Record) -> str:
    line = f"  {record.case!r} {formats.short(record.dtype)} {record.quantity}: {record.detail}"
    return f"{line}; {numbers(record)}" if record.bound else line


def _kind(record: Record) -> str:
    """Equal for failures that one line of the text stands for: the same case, or the same words about other shapes."""
    words = re.sub(r"\w*\[[^]]*\]|\([^)]*\)", "", record.detail)
    return f"{record.case} {record.quantity}" if record.bound else words


def check(
    function: Any,
    variant: Preset | Variant = "standard",
    *,
    framework: str | None = None,
    gradients: bool = True,
    dtypes: Sequence[str] | str = ("float16", "bfloat16", "float32"),
    device: str = "cpu",
    extremes: bool = False,
    compiled: bool = False,
    group_size: int | None = None,
    init: Mapping[str, Any] | None = None,
) -> Report:
    """Compare a function or layer with the golden: values, and gradients by its framework's automatic differentiation.

    The cases are those of ``rmsnorm check --list`` that it can be called with: with a gain, a bias, a mask, a residual
    or a gate only if it takes one, by the name of the argument or the parameter; along the last axis. If it must have
    a gate, every case has one, and the variant says what becomes of it. x has one to five axes. Each case runs twice,
    in NumPy and PyTorch also with x and dy transposed, sliced and channels last in memory, and with a layer in training
    and in evaluation; the worst of these counts.

    Args:
        function: of x, or of (x, weight), (x, weight, bias) and the like; a layer of PyTorch, Keras, Flax or Equinox;
            its class; ``module:attribute``; an .onnx file.
        variant: what it should be.
        framework: torch, tf, keras, jax, flax or numpy, for a function that does not show whose arrays it takes.
        gradients: whether dx, dscale, dbias and dgate count, where the framework differentiates.
        dtypes: of x.
        device: cpu or cuda.
        extremes: whether to include rows whose squares leave the range of float32, and masks with NaN under them and
            rows in which nothing counts: few implementations pass these.
        group_size: how many elements of the last axis are normalised together, as in Mamba-2; None for all of them.
        compiled: whether the function, as the compiler of its framework makes it, must agree as well.
        init: arguments for its constructor, or options for a function.

    Raises:
        ValueError: there is no such function, variant or dtype, or its width is not a multiple of ``group_size``.

    Example:
        >>> import numpy as np
        >>> def norm(x, weight):
        ...     wide = x.astype(np.float64)
        ...     y = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * weight.astype(np.float64)
        ...     return y.astype(x.dtype)
        >>> check(norm, dtypes="float32").passed
        True
        >>> print(check(norm, "gemma", dtypes="float32").text.splitlines()[0].split(":")[1].strip())
        norm is not gemma
    """
    chosen = get_variant("check", variant)
    types = (dtypes,) if isinstance(dtypes, str) else tuple(dtypes)
    for entry in types or [None]:
        if entry not in formats.FLOATS:
            raise errors.not_a_choice("check", "dtype", entry, formats.FLOATS)
    target = open_target(function, framework=framework, init=init, device=device)
    if group_size is not None and (group_size < 1 or (target.resized is None and (target.width or 0) % group_size)):
        want = "a positive divisor of the width" if group_size > 0 else "a positive number"
        raise errors.out_of_domain("check", "group_size", group_size, want, "pass the size that the norm was made with")
    run = BackendRun(target.framework, "held", version=_version(target.framework), device=device)
    began = time.monotonic()
    for fitted, data in _data(target, chosen, types, extremes, group_size):
        labels = (run.name, run.version, device, chosen.name, data.x.dtype.name, data.case.name)
        verdicts = _verdicts(fitted, data, group_size, gradients=gradients and fitted.differentiable, compiled=compiled)
        run.cases += 1
        if fitted.returned:
            came, wanted = " and ".join(sorted(fitted.returned)), fitted.bridge.array
            want = f"{wanted.__module__}.{wanted.__qualname__}"
            sentence = f"it returns {came}, expected {want}; return y, or y and x + residual"
            run.records = [Record(*labels, **asdict(failed("y", sentence)))]
            break
        run.records += [Record(*labels, **asdict(verdict)) for verdict in verdicts]
    run.seconds = time.monotonic() - began
    if run.failures:
        run.status = "differs"
    return Report(target, chosen, run)


def _data(
    target: Target, variant: Variant, types: tuple[str, ...], extremes: bool, group_size: int | None
) -> Iterator[tuple[Target, Data]]:
    pairs = {(case.name, dtype): case for case, _, dtype in select((variant.name, "standard"), types)}
    gate, required = (variant.gate_function, variant.gate_position), None if "gate" in target.arguments else False
    for (_, dtype), case in pairs.items():
        extreme = case.mask or (case.data in ("huge", "tiny") and dtype != "float16")
        fitted = _fitted(target, case, group_size) if extremes or not extreme else None
        if fitted is None:
            continue
        resized, case = fitted
        required = _requires_gate(resized, make(case, variant, dtype)) if required is None else required
        if required and (case.mask or case.residual):
            continue  # beside a gate there is neither
        case = replace(case, gate=gate if case.gate or required else None)
        yield resized, replace(make(case, variant, dtype), dh=None)


def _requires_gate(target: Target, data: Data) -> bool:
    """Whether it answers with a gate, and not without one."""
    primals, gate = (data.x, data.scale, data.bias), {"gate": np.ones_like(data.x)}
    for others, answer in ((data.arrays, False), (gate, True)):
        try:
            target.forward(*primals, **others)
        except TargetError:
            continue
        return answer
    return False


def _fitted(target: Target, case: Case, group_size: int | None) -> tuple[Target, Case] | None:
    """The target and the case, each as the other needs it; None where they do not fit."""
    asks = (("mask", case.mask), ("residual", case.residual), ("gate", case.gate))
    if (
        case.options
        or case.strided
        or (case.gate and case.name != _GATED)
        or any(needed and argument not in target.arguments for argument, needed in asks)
    ):
        return None
    if target.rank not in (None, len(case.shape)):
        return None
    if target.framework == "onnx" and case.parameters:
        return None  # a file has its own dtypes, of which the others take one
    if target.framework == "keras" and (len(case.shape) == 1 or case.parameters == "bfloat16"):
        return None  # a Keras layer takes batches, and has variables in float32 or its own dtype
    if case.bias or not case.scale:
        return None  # other cases pass the parameters that it takes
    has_scale = "scale" in target.arguments
    case = replace(case, scale=has_scale, bias="bias" in target.arguments)
    if case.name == "wide":
        case = replace(case, shape=_WIDEST)
    if group_size is not None:  # at least two groups in each row
        if not case.shape[-1]:
            return None
        case = replace(case, shape=(*case.shape[:-1], group_size * max(2, case.shape[-1] // group_size)))
    if target.width is None:
        return target, case
    if target.resized is not None and case.shape[-1]:
        return target.resized(case.shape[-1]), case
    sizes = target.shape_of("scale", (target.width,)) if has_scale else (target.width,)
    if case.name in _OF_THE_WIDTH or (case.data == "non_finite" and sizes[0] < 10):
        return None
    axis = tuple(range(-len(sizes), 0))
    return target, replace(case, shape=(*case.shape[:-1], *sizes), options={"axis": axis})


def _in_groups(data: Data, size: int) -> Data:
    """The same call with the groups along an axis of their own, as the golden takes them."""

    def split(array: Array | None) -> Any:
        return None if array is None else array.reshape(*array.shape[:-1], array.shape[-1] // size, size)

    arrays = {name: split(getattr(data, name)) for name in ("x", "scale", "bias", "dy", "mask", "residual", "gate")}
    tangents = tuple(map(split, data.tangents))
    case = replace(data.case, shape=arrays["x"].shape, options={"axis": -1, "feature_axis": (-2, -1)})
    return recast(replace(data, case=case, axis=-1, feature_axis=(-2, -1), tangents=tangents, **arrays), data.variant)


def _expected(data: Data, quantities: Sequence[str], group_size: int | None) -> dict[str, Expected]:
    asked = data if group_size is None else _in_groups(data, group_size)
    expected = {name: _allowed(name, want, asked) for name, want in expect(asked, quantities).items()}
    if group_size is None:
        return expected

    def flat(array: Array) -> Array:
        return array.reshape(*array.shape[:-2], array.shape[-2] * array.shape[-1])

    return {name: Expected(flat(want.value), flat(want.unit), want.bound) for name, want in expected.items()}


def _verdicts(target: Target, data: Data, group_size: int | None, *, gradients: bool, compiled: bool) -> list[Verdict]:
    """A verdict on each quantity: on the first way to call the target in which it differs, else on the first way."""
    counted = ("y", *_GRADIENTS.values()) if gradients else ("y",)
    expected = _expected(data, counted, group_size)
    verdicts: dict[str, Verdict] = {}
    first: dict[str, Array] = {}
    for way, called, view, scope, differentiated in _ways(target, data, compiled=compiled):
        with scope:
            results, raised = _results(called, view, gradients=gradients and differentiated)
        judged = [failed(name, sentence) for name, sentence in raised.items()]
        new = {name: [y] for name, y in results.items() if name not in first or first[name].tobytes() != y.tobytes()}
        wanted = {name: want for name, want in expected.items() if name in new or not (first or raised)}
        for verdict in [*judged, *compare(Outcome(new), wanted)]:
            if verdict.quantity not in verdicts or (verdicts[verdict.quantity].passed and not verdict.passed):
                detail = f"{way}: {verdict.detail}" if way and verdict.detail else verdict.detail
                verdicts[verdict.quantity] = replace(verdict, detail=detail)
        first = first or results
    if target.touched:
        names = ", ".join(sorted(target.touched))
        verdicts = {name: failed(name, f"inputs written to: {names}") for name in verdicts}
    return list(verdicts.values())


def _ways(
    target: Target, data: Data, *, compiled: bool
) -> Iterator[tuple[str, Target, Data, contextlib.AbstractContextManager[Any], bool]]:
    """The ways to call a target that must not change what it computes: name, target, data, context, differentiated.

    The first one has no name. A library that compiles would compile every derivative again.
    """
    same, cheap = contextlib.nullcontext(), not target.bridge.compiles
    yield "", target, data, same, True
    yield "called again", target, data, same, False
    if target.training is not None:
        yield "in training", target, data, target.training(True), cheap
        yield "in evaluation", target, data, target.training(False), False
    if target.bridge.strided and data.x.size:
        for layout, view in _LAYOUTS.items():
            x, dy, gate = view(data.x), view(data.dy), None if data.gate is None else view(data.gate)
            if x is not None and dy is not None and x.strides != data.x.strides:
                yield layout, target, replace(data, x=x, dy=dy, gate=gate), same, True
    if compiled:
        yield "compiled", replace(target, function=target.bridge.compiled(target.function)), data, same, True


def _in_order(order: Callable[[tuple[int, ...]], tuple[int, ...]], axes: int) -> Callable[[Array], Array | None]:
    """Makes copies of an array with at least so many axes whose memory has them in another order."""

    def view(array: Array) -> Array | None:
        if array.ndim < axes:
            return None
        memory = order(tuple(range(array.ndim)))
        return np.ascontiguousarray(array.transpose(memory)).transpose(np.argsort(memory))

    return view


def _sliced(array: Array, step: int) -> Array:
    """A copy between elements that do not belong to it."""
    n = array.shape[-1]
    wider = np.full((*array.shape[:-1], step * n + 3), 7, array.dtype)
    wider[..., 1 : 1 + step * n : step] = array
    return wider[..., 1 : 1 + step * n : step]


_LAYOUTS: Final[Mapping[str, Callable[[Array], Array | None]]] = {
    "x transposed in memory": _in_order(lambda axes: (*axes[:-2], *axes[:-3:-1]), 2),
    "x with its first axes swapped in memory": _in_order(lambda axes: (*axes[1::-1], *axes[2:]), 3),
    "x channels last in memory": _in_order(lambda axes: (axes[0], *axes[2:], axes[1]), 4),
    "x a slice of wider rows": lambda array: _sliced(array, 1),
    "x every second element of its rows": lambda array: _sliced(array, 2),
}


def _results(target: Target, data: Data, *, gradients: bool) -> tuple[dict[str, Array], dict[str, str]]:
    """The quantities by their names, and a sentence for what raised instead."""
    primals = (data.x, data.scale, data.bias)
    try:
        results = {"y": target.forward(*primals, **data.arrays)}
    except TargetError as error:
        return {}, {"y": str(error)}
    wrong = {} if target.second is None else _wrong_sum(target.second, data)
    if not gradients:
        return results, wrong
    try:
        inputs = {**dict(zip(("x", "scale", "bias"), primals, strict=True)), **data.arrays}
        derivatives = target.all_gradients(data.dy, **{name: a for name, a in inputs.items() if a is not None})
    except TargetError as error:
        return results, wrong | {"dx": str(error)}
    results |= {d: g for name, d in _GRADIENTS.items() if (g := derivatives.get(name)) is not None}
    return results, wrong


def _wrong_sum(got: Array, data: Data) -> dict[str, str]:
    """A sentence on the second result where that is not x + residual, rounded once to its dtype."""
    want = add(data.x, data.residual, data.call.x)
    if got.shape == want.shape and got.dtype == want.dtype and np.array_equal(got, want, equal_nan=True):
        return {}
    came, wanted = (errors.describe(a.shape, a.dtype.name) for a in (got, want))
    return {"y": f"the second result is another {came}, expected x + residual, {wanted}"}


def _allowed(name: str, want: Expected, data: Data) -> Expected:
    """The bound for a target that may compute in float32 and differentiate automatically.

    Where h / rho is rounded before the gain, automatic differentiation rounds what the formulas do not: dy * gain for
    dx, and for dscale h / rho and its product with dy. Each errs by at most 1 in units of the terms. A gate after the
    norm adds dy f(z) to each, and before it what there is for dx to dgate. The share of identical bits counts on values
    that are not alike, and so not on rows that are constant.
    """
    ratio, identical = want.bound.ratio, want.bound.identical
    if data.call.norm is not None:
        u = formats.unit_roundoff(data.call.norm) / formats.unit_roundoff(want.value.dtype.name)
        ratio += {"dx": 1.0, "dscale": 2.0}.get(name, 0.0) * u
        if data.gate is not None:
            ratio += u * (name == "dgate" if data.call.is_gated_before else name in ("dx", "dscale", "dbias"))
    return replace(want, bound=Bound(ratio, 0.0 if data.case.data == "constant" else identical))


def _version(framework: str) -> str:
    try:
        return importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:
        return ""
