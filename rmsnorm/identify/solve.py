"""identify, from the first call of a target to its name: every step asks, learns one thing, and passes it on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from rmsnorm.identify.batches import solve_batches
from rmsnorm.identify.behaviour import solve_behaviour, solve_float64
from rmsnorm.identify.confirm import Fresh, confirm, nearest
from rmsnorm.identify.denominator import kind_of, solve_denominator
from rmsnorm.identify.extras import solve_extras
from rmsnorm.identify.findings import Findings, NotRms
from rmsnorm.identify.form import solve_form
from rmsnorm.identify.gradients import solve_gate_gradient, solve_gradients
from rmsnorm.identify.groups import grouped
from rmsnorm.identify.identity import Identity
from rmsnorm.identify.model import Model
from rmsnorm.identify.names import named
from rmsnorm.identify.rounding import Numerics, explained, solve_rounding, solve_stages
from rmsnorm.identify.session import Session, open_session
from rmsnorm.targets.open import WIDTH, open_target
from rmsnorm.targets.target import Target, TargetError, random_state_kept
from rmsnorm.variants import PRESETS, Variant

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
    target: Target, *, width: int | None = None, gradients: bool = True, time_limit: float = TIME_LIMIT
) -> Identity:
    """Identify a target that is open."""
    start = time.monotonic()
    findings = Findings()
    target.touched.clear()  # by calls that another caller made
    if target.notes:
        findings.add("assumed", "; ".join(target.notes), "needed to call it")
    identity = Identity(target.name, target.framework)
    try:
        with target.evaluating():
            session = open_session(target, width or target.width or WIDTH, start + time_limit, time_limit, findings)
            identity = _solve(session, identity, gradients=gradients)
    except NotRms as reason:
        findings.withdraw_defects()  # they rest on a form that is not the target's
        findings.add("kind", "none", str(reason))
    except TargetError as error:
        findings.defect(str(error))
    seconds = time.monotonic() - start
    return replace(identity, findings=findings.answers, defects=findings.defects, seconds=seconds)


def _solve(session: Session, identity: Identity, *, gradients: bool) -> Identity:
    # whether it is a function, and which elements of x change one another
    _is_a_function(session)
    session = grouped(session)

    # y = h / rho * (o + gain) + bias: first what surrounds rho, then rho on large and small rows, at several widths
    session, model, optional_gate = solve_form(session)
    before = len(session.findings)  # the defects of later steps rest on the model
    model = solve_denominator(session, model)

    # the dtypes of the steps, and where results are rounded; now the variant has all its fields
    stages = solve_stages(session, model)
    numerics = solve_rounding(session, model, stages)
    model = replace(model, variant=_variant(session, model, numerics), gain_rounded=numerics.gain_rounded)

    # the model must predict y on data that were not used until here: else nothing is said that rests on it
    keeps_float64 = solve_float64(session, model)
    fresh = Fresh(session, numerics)
    confirmed, formula, evidence = confirm(model, numerics, fresh, keeps_float64=keeps_float64)
    session.findings.add("confirmed", confirmed, evidence)
    if formula or model.gate or any(explained(stages, dtype) for dtype, stages in numerics.stages.items()):
        solve_behaviour(session, model)
        if gradients:
            solve_gradients(session, model)
            if confirmed:
                solve_gate_gradient(session, model)
        model = replace(model, variant=solve_extras(session, model))
        solve_batches(session, gradients=gradients)
    else:
        session.findings.withdraw_model(before)
    _ask_in_training(session)
    if session.target.touched:
        session.findings.defect(f"it writes to its arguments: {', '.join(sorted(session.target.touched))}")
    if optional_gate is not None and confirmed:
        with_gate = replace(model, gate=optional_gate)
        _ask_with_gate(session, with_gate, numerics, keeps_float64, gradients=gradients)
    if not confirmed:
        session.findings.defect("the solved model does not predict y on fresh data within the bounds")
    kind = kind_of(model)
    recognised = confirmed and kind == "rmsnorm" and not session.findings.defects
    gate = model.gate or optional_gate
    return replace(
        identity,
        kind=kind,
        variant=model.variant if kind != "layernorm" else None,
        recognised=recognised,
        plain=recognised and model.plain and not session.layout.group,
        nearest=nearest(fresh, model.variant),
        last_axes=session.layout.last,
        axes=session.layout.axes,
        rank=len(session.layout.sizes),
        activation=gate.activation if gate else None,
    )


def _ask_with_gate(session: Session, model: Model, numerics: Numerics, keeps_float64: bool, *, gradients: bool) -> None:
    """Whether the model predicts y and its gradients with a gate, too, which all else was asked without."""
    session = session.withholding(*session.withheld - {"gate"})
    fresh = Fresh(session, numerics)
    everywhere, _, evidence = confirm(model, numerics, fresh, keeps_float64=keeps_float64)
    session.findings.add("confirmed_gate", everywhere, evidence)
    if not (everywhere and fresh.answers):
        session.findings.defect("with a gate, y is not what the model predicts within the bounds")
    elif gradients:
        solve_gate_gradient(session, model)


def _is_a_function(session: Session) -> None:
    """Whether the same x gives the same y, before anything is concluded from what y is.

    Raises:
        NotRms: it does not.
    """
    rows = np.random.default_rng(21).normal(size=(4, session.n))
    if session.rows(rows).tobytes() != session.rows(rows).tobytes():
        raise NotRms("two calls with the same x give different y: it is random, or it keeps something between calls")
    session.findings.add("repeatable", True, "two calls with the same x give the same bits")


def _ask_in_training(session: Session) -> None:
    """Whether a layer computes the same when it trains."""
    if session.target.training is None:
        return
    rows = np.random.default_rng(22).normal(size=(4, session.n))
    want = session.rows(rows)
    try:
        with session.target.training(True):
            same = [session.rows(rows).tobytes() == want.tobytes() for _ in range(2)]
    except TargetError as error:
        session.findings.defect(f"in training: {error}")
        return
    session.findings.add("training", "the same" if all(same) else "otherwise", "y in training beside y in evaluation")
    if not all(same):
        session.findings.defect("in training, y is another one than in evaluation")


def _variant(session: Session, model: Model, numerics: Numerics) -> Variant:
    """The solved variant, under the name of the first preset that has the same values of all observable fields."""
    variant = model.variant.replace(rounding=numerics.rounding or "after_scale", result_dtype=numerics.result or "x")
    asked = {finding.name: finding.value for finding in session.findings.answers}
    hidden = {name for name in _SOMETIMES_HIDDEN if asked.get(name, name) is None}
    if variant.partial is None:
        hidden.add("partial_rounding")
    exact = named(variant, PRESETS.values(), unlike=hidden, own=())
    return exact if exact is not variant else named(variant, PRESETS.values(), unlike=hidden | {"bias"}, own=("bias",))
