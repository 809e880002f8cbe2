"""Compares anybody's function or layer with the golden, on the cases of the kit that it can be called with."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final

from rmsnorm import dtypes as formats
from rmsnorm import errors
from rmsnorm.accuracy.bounds import Bound
from rmsnorm.identify import identify
from rmsnorm.parity.cases import Case, Data, make, select
from rmsnorm.parity.judge import Expected, Outcome, Verdict, compare, expect, failed
from rmsnorm.parity.report import numbers
from rmsnorm.parity.run import BackendRun, Record
from rmsnorm.targets import Target, TargetError, open_target
from rmsnorm.variants import Preset, Variant, get_variant

_OF_THE_WIDTH: Final = ("odd", "wide", "width 1", "no columns")
_SHOWN: Final = 6


@dataclass(frozen=True)
class Report:
    """The result of ``check``.

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
        worst = sorted(run.failures, key=lambda record: record.quantity != "y")
        for r in worst[:_SHOWN]:
            line = f"  {r.case!r} {formats.short(r.dtype)} {r.quantity}: {r.detail}"
            lines.append(f"{line}; {numbers(r)}" if r.bound else line)
        if len(worst) > _SHOWN:
            lines.append(f"  and {len(worst) - _SHOWN} more")
        return "\n".join([*lines, "identify says:", *(f"  {line}" for line in self._identity())])

    def _identity(self) -> list[str]:
        try:
            identity = identify(self.target)
        except Exception as error:  # a failure of identify must not hide the differences
            return [f"nothing: {type(error).__name__}: {error}"]
        return [*identity.differences(self.variant), *identity.text.splitlines()]


def check(
    function: Any,
    variant: Preset | Variant = "standard",
    *,
    framework: str | None = None,
    gradients: bool = True,
    dtypes: Sequence[str] | str = ("float16", "bfloat16", "float32"),
    device: str = "cpu",
    extremes: bool = False,
    init: Mapping[str, Any] | None = None,
) -> Report:
    """Compare a function or layer with the golden: values, and gradients by its framework's automatic differentiation.

    The cases are those of ``rmsnorm check --list`` that it can be called with: with a gain, a bias, a mask or a
    residual only if it takes one, by the name of the argument or the parameter; along the last axis.

    Args:
        function: of x, or of (x, weight), (x, weight, bias) and the like; a layer of PyTorch, Keras, Flax or Equinox;
            its class; ``module:attribute``; an .onnx file.
        variant: what it should be.
        framework: torch, tf, keras, jax, flax or numpy, for a function that does not show whose arrays it takes.
        gradients: whether dx, dscale and dbias count, where the framework differentiates.
        dtypes: of x.
        device: cpu or cuda.
        extremes: whether to include rows whose squares leave the range of float32, and masks with NaN under them and
            rows in which nothing counts: few implementations pass these.
        init: arguments for its constructor, or options for a function.

    Raises:
        ValueError: there is no such function, variant or dtype.

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
    run = BackendRun(target.framework, "held", version=_version(target.framework), device=device)
    began = time.monotonic()
    for fitted, data in _data(target, chosen, types, extremes):
        labels = (run.name, run.version, device, chosen.name, data.x.dtype.name, data.case.name)
        verdicts = _verdicts(fitted, data, gradients=gradients and fitted.differentiable)
        run.records += [Record(*labels, **asdict(verdict)) for verdict in verdicts]
        run.cases += 1
    run.seconds = time.monotonic() - began
    if run.failures:
        run.status = "differs"
    return Report(target, chosen, run)


def _data(target: Target, variant: Variant, types: tuple[str, ...], extremes: bool) -> Iterator[tuple[Target, Data]]:
    pairs = {(case.name, dtype): case for case, _, dtype in select((variant.name, "standard"), types)}
    for (_, dtype), case in pairs.items():
        extreme = case.mask or (case.data in ("huge", "tiny") and dtype != "float16")
        fitted = _fitted(target, case) if extremes or not extreme else None
        if fitted is not None:
            resized, case = fitted
            yield resized, replace(make(case, variant, dtype), dh=None)


def _fitted(target: Target, case: Case) -> tuple[Target, Case] | None:
    """The target and the case, each as the other needs it; None where they do not fit."""
    asks = (("mask", case.mask), ("residual", case.residual))
    if case.options or case.strided or any(needed and argument not in target.arguments for argument, needed in asks):
        return None
    if target.framework == "keras" and (len(case.shape) == 1 or case.parameters == "bfloat16"):
        return None  # a Keras layer takes batches, and has variables in float32 or its own dtype
    if case.bias or not case.scale:
        return None  # other cases pass the parameters that it takes
    has_scale = "scale" in target.arguments
    case = replace(case, scale=has_scale, bias="bias" in target.arguments)
    if target.width is None:
        return target, case
    if target.resized is not None and case.shape[-1]:
        return target.resized(case.shape[-1]), case
    sizes = target.shape_of("scale", (target.width,)) if has_scale else (target.width,)
    if case.name in _OF_THE_WIDTH or (case.data == "non_finite" and sizes[0] < 10):
        return None
    axis = tuple(range(-len(sizes), 0))
    return target, replace(case, shape=(*case.shape[:-1], *sizes), options={"axis": axis})


def _verdicts(target: Target, data: Data, *, gradients: bool) -> list[Verdict]:
    counted = ("y", "dx", "dscale", "dbias") if gradients else ("y",)
    expected = {name: _allowed(name, want, data) for name, want in expect(data).items() if name in counted}
    try:
        outcome = _outcome(target, data, gradients=gradients)
    except TargetError as error:
        return [failed(name, str(error)) for name in expected]
    return compare(outcome, expected)


def _outcome(target: Target, data: Data, *, gradients: bool) -> Outcome:
    primals = (data.x, data.scale, data.bias)
    results = {"y": [target.forward(*primals, **data.arrays)]}
    if gradients:
        derivatives = target.gradients(*primals, data.dy, **data.arrays)
        results |= {n: [g] for n, g in zip(("dx", "dscale", "dbias"), derivatives, strict=True) if g is not None}
    return Outcome(results, tuple(sorted(target.touched)))


def _allowed(name: str, want: Expected, data: Data) -> Expected:
    """The bound for a target that may compute in float32 and differentiate automatically.

    Where h / rho is rounded before the gain, automatic differentiation rounds what the formulas do not: dy * gain for
    dx, and for dscale h / rho and its product with dy. Each errs by at most 1 in units of the terms. The share of
    identical bits counts on values that are not alike, and so not on rows that are constant.
    """
    ratio, identical = want.bound.ratio, want.bound.identical
    if data.call.norm is not None:
        u = formats.unit_roundoff(data.call.norm) / formats.unit_roundoff(want.value.dtype.name)
        ratio += {"dx": 1.0, "dscale": 2.0}.get(name, 0.0) * u
    return replace(want, bound=Bound(ratio, 0.0 if data.case.data == "constant" else identical))


def _version(framework: str) -> str:
    try:
        return importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:
        return ""
