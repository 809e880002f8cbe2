"""identify, from the first call of a target to its name: ``_solved`` asks one question after the other."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from rmsnorm.identify.affine import solve_affine
from rmsnorm.identify.batches import solve_batches
from rmsnorm.identify.denominator import kind_of, solve_denominator
from rmsnorm.identify.extremes import solve_extremes, solve_float64
from rmsnorm.identify.findings import Findings, NotRms
from rmsnorm.identify.first import ASKED, first_parameters
from rmsnorm.identify.gradients import solve_gate_gradient, solve_gradients
from rmsnorm.identify.groups import grouped
from rmsnorm.identify.held_out import ask_held_out, confirm
from rmsnorm.identify.identity import Identity
from rmsnorm.identify.layout import Layout
from rmsnorm.identify.mask_and_residual import solve_mask_and_residual
from rmsnorm.identify.model import Model
from rmsnorm.identify.names import named
from rmsnorm.identify.probe import Probe, open_probe
from rmsnorm.identify.rounding import Numerics, explained, solve_rounding, solve_stages
from rmsnorm.identify.sizes import solve_sizes
from rmsnorm.identify.sums import solve_sums
from rmsnorm.specification.variants import Variant
from rmsnorm.targets.calling import with_values
from rmsnorm.targets.open import WIDTH, open_target
from rmsnorm.targets.target import Target, TargetError, random_state_kept

TIME_LIMIT: Final = 60.0


@random_state_kept()
def identify(
    target: Any,
    *,
    framework: str | None = None,
    width: int | None = None,
    init: Mapping[str, Any] | None = None,
    gradients: bool = True,
    device: str = "cpu",
    time_limit: float = TIME_LIMIT,
    shape: Sequence[int] | None = None,
    axis: int | Sequence[int] = -1,
    args: Mapping[str, tuple[Sequence[int], float]] | None = None,
    call: str | None = None,
) -> Identity:
    """Find out which normalisation a callable computes, as a black box, with the evidence.

    Args:
        target: a function, a layer, its class, ``module:attribute``, ``file.py:attribute`` or an .onnx file, as
            open_target takes it.
        framework: as of open_target, for a function that does not show whose arrays it takes.
        width: size of the normalised axis; None for 64, or the only size that the target takes.
        init: arguments for its constructor, or options for a function.
        gradients: whether to ask for dx, dscale and dbias, too.
        device: cpu or cuda.
        time_limit: in seconds, checked before every call; only the command line can end a target that hangs.
        shape, axis, args, call: the shape of x, the axes of its parameters, other arguments, and the order of its
            arguments, as of open_target.

    Returns:
        The identity. A target that raises, returns another shape or takes too long has kind ``none`` and a sentence
        among its defects.

    Raises:
        ValueError: there is no such target or framework, or ``init`` cannot build it.

    Example:
        >>> import numpy as np
        >>> def norm(x, weight):
        ...     return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
        >>> identity = identify(norm)
        >>> identity.kind, identity.variant.eps, identity.variant.eps_position
        ('rmsnorm', 1e-05, 'inside')
    """
    opened = open_target(
        target, framework=framework, width=width, init=init, device=device, shape=shape, axis=axis, args=args, call=call
    )
    return identify_opened(opened, width=width, gradients=gradients, time_limit=time_limit)


def identify_opened(
    target: Target,
    *,
    width: int | None = None,
    gradients: bool = True,
    time_limit: float = TIME_LIMIT,
    layout: Layout | None = None,
) -> Identity:
    """Identify a target that is open, with this layout of its rows where the caller knows it."""
    start = time.monotonic()
    findings = Findings()
    target.touched.clear()  # by calls that another caller made
    if target.notes:
        findings.add("assumed", "; ".join(target.notes), "needed to call it")
    identity = Identity(target.name, target.framework)
    try:
        with target.evaluating():
            probe = open_probe(target, width or target.width or WIDTH, start + time_limit, time_limit, findings, layout)
            identity = _solved(probe, gradients=gradients)
    except NotRms as reason:
        findings.withdraw_defects()  # they rest on a form that is not the target's
        findings.add("kind", "none", str(reason))
    except TargetError as error:
        findings.defect(str(error))
    seconds = time.monotonic() - start
    return replace(identity, findings=findings.answers, defects=findings.defects, seconds=seconds)


def _solved(probe: Probe, *, gradients: bool) -> Identity:
    """Ask one question after the other: an answer is in the findings, and what the next questions need is in the model.

    Raises:
        NotRms, TargetError: it is no norm that a model describes, or it does not answer.
    """
    findings = probe.findings
    _ask_twice(probe)
    probe, model, optional_gate = solve_affine(grouped(probe))
    of_affine = len(findings)
    model = solve_denominator(probe, model)
    numerics = solve_rounding(probe, model, solve_stages(probe, model))
    model = replace(model, variant=_variant(probe, model, numerics), gain_rounded=numerics.gain_rounded)
    keeps_float64 = solve_float64(probe, model)
    held_out = ask_held_out(probe, numerics)
    confirmed, formula, evidence = confirm(model, numerics, held_out, keeps_float64=keeps_float64)
    findings.add("confirmed", confirmed, evidence)
    by_stages = any(explained(stages, dtype) for dtype, stages in numerics.stages.items())
    if formula or model.gate is not None or by_stages:  # the next questions rest on the model in 32 and 64 bits
        solve_extremes(probe, model)
        if gradients:
            solve_gradients(probe, model)
            solve_sums(probe)
        if gradients and confirmed:
            solve_gate_gradient(probe, model)
        model = replace(model, variant=solve_mask_and_residual(probe, model))
        solve_batches(probe, gradients=gradients)
    else:
        findings.withdraw_model(of_affine)
    _ask_eps(probe)
    _ask_in_training(probe)
    _ask_first_parameters(probe, model.variant.scale_offset)
    if touched := probe.target.touched:
        findings.defect(f"it writes to its arguments: {', '.join(sorted(touched))}")
    if optional_gate and confirmed:
        _ask_optional_gate(probe, replace(model, gate=optional_gate), numerics, keeps_float64, gradients)
    if confirmed and not findings.defects:  # else what is wrong is said already
        solve_sizes(probe, model, numerics, gradients=gradients)
    if not confirmed:  # said last, after the defects that may be the reason
        findings.defect("the solved model does not predict y on fresh data within the bounds")
    layout, kind, answer = probe.layout, kind_of(model), findings["kind"]
    recognised = confirmed and kind == "rmsnorm" and not findings.defects
    gate = model.gate or optional_gate
    return Identity(
        probe.target.name,
        probe.target.framework,
        kind="l2norm" if answer is not None and answer.value == "l2norm" else kind,
        variant=model.variant if kind != "layernorm" else None,
        recognised=recognised,
        plain=recognised and model.plain and not layout.group,
        last_axes=layout.last,
        axes=layout.axes,
        rank=len(layout.sizes),
        gate=gate,
        library=probe.target.library,
    )


def _ask_twice(probe: Probe) -> None:
    """Does the same x give the same y? Else nothing can be concluded from y."""
    rows = np.random.default_rng(21).normal(size=(4, probe.n))
    if probe.rows(rows).tobytes() != probe.rows(rows).tobytes():
        raise NotRms("two calls with the same x give different y: it is random, or it keeps something between calls")
    probe.findings.add("repeatable", True, "two calls with the same x give the same bits")


def _ask_eps(probe: Probe) -> None:
    """Where eps is an argument: does y depend on it?"""
    if "eps" not in probe.target.asks:
        return
    rows, values = np.random.default_rng(24).normal(size=(4, probe.n)), (0.25, 2.0**-6)
    try:
        y = [replace(probe, target=with_values(probe.target, optional=True, eps=eps)).rows(rows) for eps in values]
    except (TargetError, ValueError) as error:
        probe.findings.defect(f"with another eps: {error}")
        return
    obeys = y[0].tobytes() != y[1].tobytes()
    probe.findings.add("eps_argument", obeys, f"y with eps {values[0]:g} beside y with eps {values[1]:g}")
    if not obeys:
        probe.findings.defect("it ignores its eps: y is the same whatever is passed")


def _ask_in_training(probe: Probe) -> None:
    """Does a layer compute the same when it trains?"""
    training = probe.target.training
    if training is None:
        return
    rows = np.random.default_rng(22).normal(size=(4, probe.n))
    want = probe.rows(rows)
    try:
        with training(True):
            same = all(probe.rows(rows).tobytes() == want.tobytes() for _ in range(2))
    except TargetError as error:
        probe.findings.defect(f"in training: {error}")
        return
    probe.findings.add("training", "the same" if same else "otherwise", "y in training beside y in evaluation")
    if not same:
        probe.findings.defect("in training, y is another one than in evaluation")


def _ask_first_parameters(probe: Probe, offset: float) -> None:
    """Does a new layer multiply the normalised row by 1, and add 0?"""
    own = [name for name in ("scale", "bias") if probe.takes(name)]
    if not own or not probe.target.is_new or ASKED not in probe.accepts:
        return
    fresh = probe.leaving_out(*probe.left_out, *own)  # then the layer keeps the parameters that it was made with
    rows = 8 * np.random.default_rng(23).normal(size=(16, probe.n))
    try:
        y = fresh.unit(rows, ASKED), fresh.unit(-rows, ASKED), probe.unit(rows, ASKED)
    except TargetError:  # it has parameters of another dtype
        return
    factor, sentences = first_parameters(*y, offset)
    probe.findings.add("initial_factor", factor, "what a new layer multiplies the normalised row by")
    probe.findings.defect(*sentences)


def _ask_optional_gate(probe: Probe, model: Model, numerics: Numerics, keeps_float64: bool, gradients: bool) -> None:
    """With a gate, which all else was asked without: are y and its gradients what the model predicts?"""
    probe = probe.leaving_out(*probe.left_out - {"gate"})
    answers = ask_held_out(probe, numerics)
    everywhere, _, evidence = confirm(model, numerics, answers, keeps_float64=keeps_float64)
    probe.findings.add("confirmed_gate", everywhere, evidence)
    if not (everywhere and answers):
        probe.findings.defect("with a gate, y is not what the model predicts within the bounds")
    elif gradients:
        solve_gate_gradient(probe, model)


def _variant(probe: Probe, model: Model, numerics: Numerics) -> Variant:
    """The solved variant, by its name."""
    variant = model.variant.replace(
        rounding=numerics.rounding or "after_scale",
        result_dtype=numerics.result or "x",
        scale_dtype=numerics.scale_dtype,
    )
    values = {finding.name: finding.value for finding in probe.findings.answers}
    return named(variant, values, probe.target.library)
