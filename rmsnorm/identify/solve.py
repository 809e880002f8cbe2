"""identify, from the first call of a target to its name: every step asks, learns one thing, and passes it on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, Final

from rmsnorm.identify.behaviour import solve_behaviour, solve_float64
from rmsnorm.identify.confirm import Fresh, confirm, nearest
from rmsnorm.identify.eps import Eps, solve_eps
from rmsnorm.identify.extras import solve_extras
from rmsnorm.identify.findings import Findings
from rmsnorm.identify.form import Form, NotRms, solve_form
from rmsnorm.identify.gradients import solve_gradients
from rmsnorm.identify.identity import FIELDS, Identity, Kind
from rmsnorm.identify.model import Model
from rmsnorm.identify.partial import Partial, solve_partial
from rmsnorm.identify.rounding import Numerics, solve_rounding, solve_stages
from rmsnorm.identify.session import open_session
from rmsnorm.identify.statistic import Counted, Statistic, find_counted, grouped, solve_statistic
from rmsnorm.targets.open import WIDTH, open_target
from rmsnorm.targets.target import Target, TargetError
from rmsnorm.variants import PRESETS, Variant

TIME_LIMIT: Final = 60.0
_KINDS: Final[dict[Kind, str]] = {
    "layernorm": "the mean is subtracted from x and in the statistic",
    "rms_scaling": "the mean is subtracted in the statistic but not from x: this is not RMSNorm",
    "rmsnorm": "x divided by the root of its mean square, whatever its mean",
}
_STATISTIC: Final = "solved from the sum of squares and the squared sum of 32 rows"
_SOMETIMES_HIDDEN: Final = {"scale_offset", "rounding", "result_dtype", "partial_rounding", "eps_position"}


def identify(
    target: Any,
    *,
    framework: str | None = None,
    width: int | None = None,
    init: Mapping[str, Any] | None = None,
    gradients: bool = True,
    device: str = "cpu",
    time_limit: float = TIME_LIMIT,
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
    opened = open_target(target, framework=framework, width=width, init=init, device=device)
    return identify_opened(opened, width=width, gradients=gradients, time_limit=time_limit)


def identify_opened(
    target: Target, *, width: int | None = None, gradients: bool = True, time_limit: float = TIME_LIMIT
) -> Identity:
    """Identify a target that is open."""
    start = time.monotonic()
    findings = Findings()
    for sentence in target.notes:
        findings.add("assumed", sentence, "needed to call it")
    try:
        identity = _solve(target, width or target.width or WIDTH, start + time_limit, time_limit, gradients, findings)
    except NotRms as reason:
        findings.add("kind", "none", str(reason))
        identity = _unrecognised(target, findings)
    except TargetError as error:
        findings.defect(str(error))
        identity = _unrecognised(target, findings)
    return replace(identity, seconds=time.monotonic() - start)


def _unrecognised(target: Target, findings: Findings) -> Identity:
    return Identity(
        target=target.name,
        framework=target.framework,
        kind="none",
        variant=None,
        recognised=False,
        plain=False,
        findings=tuple(findings.entries.values()),
        defects=tuple(findings.defects),
        nearest=(),
    )


def _solve(
    target: Target, width: int, deadline: float, time_limit: float, gradients: bool, findings: Findings
) -> Identity:
    # how it can be called: the shapes and dtypes that it takes, and which elements of x change one another
    session = open_session(target, width, deadline, time_limit, findings)
    session = grouped(session, findings)
    counted = find_counted(session)

    # y = h / rho * (o + gain) + bias: first what surrounds rho, then rho on large rows, then eps on small ones
    session, form = solve_form(session, findings)
    statistic = solve_statistic(session, counted, centred=form.centred)
    kind = _kind(form, statistic, findings)
    partial = solve_partial(session, counted, findings)
    _report_denominator(statistic, counted, session.n, findings)
    eps = solve_eps(session, statistic, counted.k, findings, centred=form.centred)
    model = _model(form, statistic, counted, partial, eps, session.n)

    # the dtypes of the steps, and where results are rounded; now the variant has all its fields
    stages = solve_stages(session, model, findings)
    numerics = solve_rounding(session, model, stages, findings)
    model = replace(model, variant=_named(model, numerics, findings), gain_rounded=numerics.gain_rounded)

    # what a variant does not say
    solve_behaviour(session, model, findings)
    keeps_float64 = solve_float64(session, model, findings)
    if gradients:
        solve_gradients(session, model, form, findings)
    solve_extras(session, model, findings)

    # the model must predict y on data that were not used until here
    fresh = Fresh(session, numerics)
    confirmed = confirm(model, numerics, fresh, findings, keeps_float64=keeps_float64)
    if session.target.touched:
        findings.defect(f"it writes to its arguments: {', '.join(sorted(session.target.touched))}")
    if not confirmed:
        findings.defect("the solved model does not predict y on fresh data within the bounds")
    recognised = confirmed and kind == "rmsnorm" and not findings.defects
    return Identity(
        target=target.name,
        framework=target.framework,
        kind=kind,
        variant=model.variant if kind != "layernorm" else None,
        recognised=recognised,
        plain=recognised and model.plain and not session.layout.group,
        findings=tuple(findings.entries.values()),
        defects=tuple(findings.defects),
        nearest=nearest(fresh, model.variant, form.bias),
        last_axes=session.layout.last,
        activation=form.gate.activation if form.gate else None,
    )


def _kind(form: Form, statistic: Statistic, findings: Findings) -> Kind:
    variance = statistic.kind == "variance"
    if form.centred and not variance:
        raise NotRms("the mean is subtracted in the numerator but not in the denominator")
    kind: Kind = "layernorm" if form.centred else "rms_scaling" if variance else "rmsnorm"
    findings.add("kind", kind, _KINDS[kind])
    findings.add("statistic", statistic.kind, _STATISTIC)
    return kind


def _report_denominator(statistic: Statistic, counted: Counted, n: int, findings: Findings) -> None:
    """Report what no variant has: another divisor, a factor of y, or the last elements in place of the first."""
    k = counted.k
    if statistic.divisor != "k":
        divisors = {
            "k - 1": f"n - 1 = {k - 1}",
            "n": f"all {n} elements, of which {k} are summed",
            "1": "1: the norm, not the root of the mean",
        }
        sentence = f"the sum of squares is divided by {divisors[statistic.divisor]}"
        findings.add("divisor", statistic.divisor, sentence)
        findings.defect(sentence)
    if statistic.factor != 1:
        findings.add("factor", statistic.factor, f"y is {statistic.factor:.6g} times what the mean square gives")
        findings.defect(f"y is {statistic.factor:.6g} times too large")
    if counted.end == "last":
        findings.defect(f"the statistic is that of the last {k} elements, not of the first")


def _model(form: Form, statistic: Statistic, counted: Counted, partial: Partial | None, eps: Eps, n: int) -> Model:
    """The model without its roundings."""
    variant = Variant(
        name="identified",
        eps=eps.value,
        eps_position=eps.position,
        statistic=statistic.kind,
        scale_offset=form.gain.offset or 0.0,
        bias=form.bias,
    )
    if partial is not None:
        variant = variant.replace(partial=partial.p, partial_rounding=partial.rounding or "ceil")
        if variant.counted(n) != counted.k:
            variant = variant.replace(partial=Fraction(counted.k, n))
    return Model(
        variant,
        centred=form.centred,
        divisor=statistic.divisor,
        last=counted.end == "last",
        eps_of_max=eps.of_max,
        gain_first=form.gain.first,
        factor=statistic.factor,
        gate=form.gate,
        narrow_eps=eps.narrow,
    )


def _named(model: Model, numerics: Numerics, findings: Findings) -> Variant:
    """The solved variant, under the name of the first preset that has the same values of all observable fields."""
    variant = model.variant.replace(rounding=numerics.rounding or "after_scale", result_dtype=numerics.result or "x")
    free = _SOMETIMES_HIDDEN & findings.unobservable
    if variant.partial is None:
        free |= {"partial_rounding"}
    for ignored in (free, free | {"bias"}):
        seen = [name for name in FIELDS if name not in ignored]
        for preset in PRESETS.values():
            if all(getattr(preset, name) == getattr(variant, name) for name in seen):
                return preset.replace(**{name: getattr(variant, name) for name in (*seen, "bias")})
    return variant
