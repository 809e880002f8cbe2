"""identify, from the first call of a target to its name: each of STEPS asks, learns something, and passes it on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from rmsnorm.identify.held_out import Answers, ask_held_out, confirm, nearest
from rmsnorm.identify.identity import Identity
from rmsnorm.identify.layout import Layout
from rmsnorm.identify.mask_and_residual import solve_mask_and_residual
from rmsnorm.identify.model import Gate, Model
from rmsnorm.identify.names import named
from rmsnorm.identify.probe import Probe, open_probe
from rmsnorm.identify.rounding import Numerics, explained, solve_rounding, solve_stages
from rmsnorm.specification.variants import PRESETS, Variant
from rmsnorm.targets.open import WIDTH, open_target
from rmsnorm.targets.target import Target, TargetError, random_state_kept

TIME_LIMIT: Final = 60.0
_SOMETIMES_HIDDEN: Final = {"scale_offset", "rounding", "result_dtype", "partial_rounding", "eps_position"}


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
        shape, axis, args: the shape of x, the axes of its parameters and other arguments, as of open_target.

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
        target, framework=framework, width=width, init=init, device=device, shape=shape, axis=axis, args=args
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
            state = State(probe, Model(Variant(name="identified")), gradients)
            for step in STEPS:
                state = step(state)
            identity = _identity(state, target)
    except NotRms as reason:
        findings.withdraw_defects()  # they rest on a form that is not the target's
        findings.add("kind", "none", str(reason))
    except TargetError as error:
        findings.defect(str(error))
    seconds = time.monotonic() - start
    return replace(identity, findings=findings.answers, defects=findings.defects, seconds=seconds)


@dataclass(frozen=True)
class State:
    """What is known of a target between two steps.

    Attributes:
        probe: how to ask it.
        model: what it computes, as far as that is solved.
        gradients: whether to ask for gradients, too.
        optional_gate: a gate that multiplies if it is passed, which the probe and the model are without.
        numerics: how it rounds.
        keeps_float64: whether it computes in float64.
        held_out: its answers to rows that no step used.
        confirmed: whether the model predicts these.
        is_explained: whether it does in 32 and 64 bits at least, so that questions may rest on it.
        of_affine: how many findings there were before the model had a denominator.
    """

    probe: Probe
    model: Model
    gradients: bool
    optional_gate: Gate | None = None
    numerics: Numerics = field(default_factory=lambda: Numerics({}, None, None, {}))
    keeps_float64: bool = True
    held_out: Answers = field(default_factory=dict)
    confirmed: bool = False
    is_explained: bool = False
    of_affine: int = 0

    @property
    def findings(self) -> Findings:
        """The record to which every step adds."""
        return self.probe.findings


def _is_a_function(state: State) -> State:
    """Does the same x give the same y? Else nothing can be concluded from y."""
    rows = np.random.default_rng(21).normal(size=(4, state.probe.n))
    if state.probe.rows(rows).tobytes() != state.probe.rows(rows).tobytes():
        raise NotRms("two calls with the same x give different y: it is random, or it keeps something between calls")
    state.findings.add("repeatable", True, "two calls with the same x give the same bits")
    return state


def _groups(state: State) -> State:
    """Which elements of a row change one another?"""
    return replace(state, probe=grouped(state.probe))


def _affine(state: State) -> State:
    """What surrounds rho in y = h / rho * (o + gain) + bias?"""
    probe, model, optional_gate = solve_affine(state.probe)
    return replace(state, probe=probe, model=model, optional_gate=optional_gate, of_affine=len(state.findings))


def _denominator(state: State) -> State:
    """What is rho, on large and small rows, at several widths?"""
    return replace(state, model=solve_denominator(state.probe, state.model))


def _rounding(state: State) -> State:
    """Which steps are rounded, and to what? Then the variant has all its fields."""
    probe, model = state.probe, state.model
    numerics = solve_rounding(probe, model, solve_stages(probe, model))
    model = replace(model, variant=_variant(probe, model, numerics), gain_rounded=numerics.gain_rounded)
    return replace(state, model=model, numerics=numerics, keeps_float64=solve_float64(probe, model))


def _held_out(state: State) -> State:
    """Does the model predict y on data that no step used? Else what rests on it is withdrawn."""
    model, numerics = state.model, state.numerics
    held_out = ask_held_out(state.probe, numerics)
    confirmed, formula, evidence = confirm(model, numerics, held_out, keeps_float64=state.keeps_float64)
    state.findings.add("confirmed", confirmed, evidence)
    by_stages = any(explained(stages, dtype) for dtype, stages in numerics.stages.items())
    is_explained = formula or model.gate is not None or by_stages
    if not is_explained:
        state.findings.withdraw_model(state.of_affine)
    return replace(state, held_out=held_out, confirmed=confirmed, is_explained=is_explained)


def _extremes(state: State) -> State:
    """What does it make of huge and tiny rows, of zeros, NaN and infinity?"""
    if state.is_explained:
        solve_extremes(state.probe, state.model)
    return state


def _gradients(state: State) -> State:
    """Are its gradients those of the model?"""
    if state.is_explained and state.gradients:
        solve_gradients(state.probe, state.model)
        if state.confirmed:
            solve_gate_gradient(state.probe, state.model)
    return state


def _mask_and_residual(state: State) -> State:
    """What does it do with a mask and with a residual?"""
    if not state.is_explained:
        return state
    variant = solve_mask_and_residual(state.probe, state.model)
    return replace(state, model=replace(state.model, variant=variant))


def _batches(state: State) -> State:
    """Has a row the same bits, however many rows there are?"""
    if state.is_explained:
        solve_batches(state.probe, gradients=state.gradients)
    return state


def _training(state: State) -> State:
    """Does a layer compute the same when it trains?"""
    probe, training = state.probe, state.probe.target.training
    if training is None:
        return state
    rows = np.random.default_rng(22).normal(size=(4, probe.n))
    want = probe.rows(rows)
    try:
        with training(True):
            same = all(probe.rows(rows).tobytes() == want.tobytes() for _ in range(2))
    except TargetError as error:
        state.findings.defect(f"in training: {error}")
        return state
    state.findings.add("training", "the same" if same else "otherwise", "y in training beside y in evaluation")
    if not same:
        state.findings.defect("in training, y is another one than in evaluation")
    return state


def _first_parameters(state: State) -> State:
    """Does a new layer multiply the normalised row by 1, and add 0?"""
    probe = state.probe
    own = [name for name in ("scale", "bias") if probe.takes(name)]
    if not own or not probe.target.is_new or ASKED not in probe.accepts:
        return state
    fresh = probe.leaving_out(*probe.left_out, *own)  # then the layer keeps the parameters that it was made with
    rows = 8 * np.random.default_rng(23).normal(size=(16, probe.n))
    offset = state.model.variant.scale_offset
    try:
        y = fresh.unit(rows, ASKED), fresh.unit(-rows, ASKED), probe.unit(rows, ASKED)
    except TargetError:  # it has parameters of another dtype
        return state
    factor, sentences = first_parameters(*y, offset)
    state.findings.add("initial_factor", factor, "what a new layer multiplies the normalised row by")
    for sentence in sentences:
        state.findings.defect(sentence)
    return state


def _arguments(state: State) -> State:
    """Does it write to its arguments?"""
    if touched := state.probe.target.touched:
        state.findings.defect(f"it writes to its arguments: {', '.join(sorted(touched))}")
    return state


def _optional_gate(state: State) -> State:
    """With a gate, which all else was asked without: are y and its gradients what the model predicts?"""
    if state.optional_gate is None or not state.confirmed:
        return state
    probe = state.probe.leaving_out(*state.probe.left_out - {"gate"})
    model = replace(state.model, gate=state.optional_gate)
    answers = ask_held_out(probe, state.numerics)
    everywhere, _, evidence = confirm(model, state.numerics, answers, keeps_float64=state.keeps_float64)
    state.findings.add("confirmed_gate", everywhere, evidence)
    if not (everywhere and answers):
        state.findings.defect("with a gate, y is not what the model predicts within the bounds")
    elif state.gradients:
        solve_gate_gradient(probe, model)
    return state


def _unpredicted(state: State) -> State:
    """Does no model predict y? It is said last, after the defects that may be the reason."""
    if not state.confirmed:
        state.findings.defect("the solved model does not predict y on fresh data within the bounds")
    return state


STEPS: Final[tuple[Callable[[State], State], ...]] = (
    _is_a_function,
    _groups,
    _affine,
    _denominator,
    _rounding,
    _held_out,
    _extremes,
    _gradients,
    _mask_and_residual,
    _batches,
    _training,
    _first_parameters,
    _arguments,
    _optional_gate,
    _unpredicted,
)


def _identity(state: State, target: Target) -> Identity:
    """What the last state says of the target."""
    model, layout, kind = state.model, state.probe.layout, kind_of(state.model)
    if (named := state.findings["kind"]) is not None and named.value == "l2norm":
        kind = "l2norm"
    recognised = state.confirmed and kind == "rmsnorm" and not state.findings.defects
    gate = model.gate or state.optional_gate
    return Identity(
        target.name,
        target.framework,
        kind=kind,
        variant=model.variant if kind != "layernorm" else None,
        recognised=recognised,
        plain=recognised and model.plain and not layout.group,
        nearest=nearest(state.held_out, model.variant),
        last_axes=layout.last,
        axes=layout.axes,
        rank=len(layout.sizes),
        activation=gate.activation if gate else None,
    )


def _variant(probe: Probe, model: Model, numerics: Numerics) -> Variant:
    """The solved variant, under the name of the first preset that has the same values of all observable fields."""
    variant = model.variant.replace(rounding=numerics.rounding or "after_scale", result_dtype=numerics.result or "x")
    asked = {finding.name: finding.value for finding in probe.findings.answers}
    hidden = {name for name in _SOMETIMES_HIDDEN if asked.get(name, name) is None}
    if variant.partial is None:
        hidden.add("partial_rounding")
    exact = named(variant, PRESETS.values(), unlike=hidden, own=())
    return exact if exact is not variant else named(variant, PRESETS.values(), unlike=hidden | {"bias"}, own=("bias",))
