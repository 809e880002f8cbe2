"""identify: opens a target, solves what it computes, confirms it on fresh data."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, Final

import numpy as np

from rmsnorm import dtypes
from rmsnorm.identify.behaviour import solve_behaviour
from rmsnorm.identify.confirm import Fresh, confirm, nearest
from rmsnorm.identify.extras import solve_extras
from rmsnorm.identify.findings import Notebook
from rmsnorm.identify.form import Form, NotRms, solve_form
from rmsnorm.identify.gradients import solve_gradients
from rmsnorm.identify.identity import FIELDS, Identity, Kind
from rmsnorm.identify.layout import Layout, find_layout, with_group
from rmsnorm.identify.model import Model
from rmsnorm.identify.partial import solve_partial
from rmsnorm.identify.rounding import Numerics, solve_rounding, solve_stages
from rmsnorm.identify.session import Session
from rmsnorm.identify.statistic import Statistic, counted, find_group, nice, solve_eps, solve_statistic
from rmsnorm.targets.open import WIDTH, open_target
from rmsnorm.targets.target import Target, TargetError
from rmsnorm.variants import PRESETS, Variant

TIME_LIMIT: Final = 60.0


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
        framework: numpy, torch, tensorflow, jax or keras for a function that does not show whose arrays it takes.
        width: size of the normalised axis; None for 64, or what the target takes.
        init: arguments for its constructor, or options for a function.
        gradients: whether to ask for dx, dscale and dbias, too.
        device: cpu or cuda.
        time_limit: in seconds, looked at before every call; a target that hangs is ended by the command line only.

    Returns:
        The identity. A target that raises, returns another shape or takes too long has kind ``none`` and a sentence
        among its defects.

    Raises:
        ValueError: there is no such target, or it cannot be built from what was given.

    Example:
        >>> import numpy as np
        >>> def norm(x, weight):
        ...     return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
        >>> found = identify(norm)
        >>> found.kind, found.variant.eps, found.variant.eps_position
        ('rmsnorm', 1e-05, 'inside')
    """
    opened = open_target(target, framework=framework, width=width, init=init, device=device)
    return identify_opened(opened, width=width, gradients=gradients, time_limit=time_limit)


def identify_opened(
    target: Target, *, width: int | None = None, gradients: bool = True, time_limit: float = TIME_LIMIT
) -> Identity:
    """Identify a target that is open."""
    start = time.monotonic()
    notes = Notebook()
    for sentence in target.notes:
        notes.found("assumed", sentence, "to call it at all")
    try:
        solved = _solve(target, width or target.width or WIDTH, start + time_limit, time_limit, gradients, notes)
    except NotRms as reason:
        notes.found("kind", "none", str(reason))
        return _nothing(target, notes, start)
    except TargetError as error:
        notes.defect(str(error))
        return _nothing(target, notes, start)
    return replace(solved, seconds=time.monotonic() - start)


def _nothing(target: Target, notes: Notebook, start: float) -> Identity:
    return Identity(
        target.name, target.framework, "none", None, False, False, tuple(notes.findings.values()), tuple(notes.defects),
        (), time.monotonic() - start,
    )  # fmt: skip


def _solve(target: Target, width: int, deadline: float, limit: float, gradients: bool, notes: Notebook) -> Identity:
    session = _session(target, width, deadline, limit, notes)
    group = find_group(session) if session.layout.axes == (len(session.layout.sizes) - 1,) else None
    if group:
        session.layout = with_group(session.layout, group)
    notes.found("axes", session.layout.story, f"what changes when one element of x {_shape(session.layout)} does")
    notes.found("group_size", group, "elements of the last axis that change one another") if group else None
    k, end = counted(session)
    form = solve_form(session, notes)
    statistic = solve_statistic(session, form, k, end, notes)
    model, kind = _model(session, form, statistic, k, end, notes)
    narrow = _eps(session, form, statistic, k, notes)
    eps = None if notes["eps"] == "machine epsilon" else notes["eps"]
    model = replace(model, variant=model.variant.replace(eps=eps), narrow_eps=narrow)
    stages = solve_stages(session, model, notes)
    numerics = solve_rounding(session, model, stages, notes)
    model = replace(model, variant=_named(model, numerics, notes), gain_rounded=numerics.gain_rounded)
    solve_behaviour(session, model, notes)
    if gradients:
        solve_gradients(session, model, notes)
    solve_extras(session, model, notes)
    fresh = Fresh(session, numerics, seed=16)
    held = confirm(session, model, numerics, fresh, notes)
    if session.target.touched:
        notes.defect(f"it writes to its arguments: {', '.join(sorted(session.target.touched))}")
    if not held:
        notes.defect("what was solved does not predict y on fresh data within the bounds")
    recognised = held and kind == "rmsnorm" and not notes.defects
    return Identity(
        target=target.name,
        framework=target.framework,
        kind=kind,
        variant=model.variant if kind != "layernorm" else None,
        recognised=recognised,
        plain=recognised and model.plain and not group,
        findings=tuple(notes.findings.values()),
        defects=tuple(notes.defects),
        nearest=nearest(fresh, model.variant, form.bias),
    )


def _shape(layout: Layout) -> str:
    return str(list(layout.shape(4 if layout.endless else 1))).replace(" ", "")


def _session(target: Target, width: int, deadline: float, limit: float, notes: Notebook) -> Session:
    """Find a shape and the dtypes that the target takes.

    Raises:
        TargetError: it takes none.
    """
    failure: TargetError | None = None
    for dtype in ("float32", "float64", "bfloat16", "float16"):
        try:
            layout = find_layout(target, width, dtype)
            break
        except TargetError as error:
            failure = failure or error
    else:
        assert failure is not None  # noqa: S101  (none worked)
        raise failure
    session = Session(target, layout, dtype, deadline=deadline, limit=limit)
    session.neutral = {"scale": 0.5, "bias": 0.25, "gate_vector": 0.0, "gate": 2.0}
    accepts = []
    rows = np.random.default_rng(17).normal(size=(4, session.n))
    for name in dtypes.FLOATS:
        try:
            y = session.rows(rows, name)
            accepts.append(name)
        except TargetError as error:
            notes.found(f"{name} x", "refused", str(error))
            continue
        if name == "float64" and not np.array_equal(y, session.rows(rows.astype(np.float32).astype(np.float64), name)):
            session.wide = name if y.dtype == np.float64 else session.wide
    session.accepts = tuple(accepts)
    return session


def _model(session: Session, form: Form, statistic: Statistic, k: int, end: str, notes: Notebook) -> tuple[Model, Kind]:
    n = session.n
    variance = statistic.kind == "variance"
    kind: Kind = "layernorm" if form.centred and variance else "rms_scaling" if variance else "rmsnorm"
    if form.centred and not variance:
        raise NotRms("the mean leaves the numerator but not the denominator")
    words = {
        "layernorm": "the mean leaves x and the statistic",
        "rms_scaling": "the mean leaves the statistic but not x: the variance divides, and this is not RMSNorm",
        "rmsnorm": "x over the root of its mean square, at every mean",
    }
    notes.found("kind", kind, words[kind])
    notes.found("statistic", statistic.kind, "of the row's sum of squares and square of its sum, solved from 32 rows")
    variant = Variant(name="identified", eps=statistic.eps, eps_position=statistic.position, statistic=statistic.kind)
    if form.offset is not None:
        variant = variant.replace(scale_offset=form.offset)
    variant = variant.replace(bias=form.bias, scale_name=variant.scale_name)
    if k < n:
        variant = _partial(session, variant, k, end, notes)
    else:
        notes.found("partial", None, f"all {n} elements of a row change the others")
    if statistic.divisor != "k":
        names = {
            "k - 1": f"n - 1 = {k - 1}",
            "n": f"all {n} elements, of which {k} are summed",
            "1": "1: the norm, not the root of the mean",
        }
        notes.found("divisor", statistic.divisor, f"the sum of squares is divided by {names[statistic.divisor]}")
        notes.defect(f"the sum of squares is divided by {names[statistic.divisor]}")
    if statistic.factor != 1:
        notes.found("factor", statistic.factor, f"y is {statistic.factor:.6g} times what the mean square gives")
        notes.defect(f"y is {statistic.factor:.6g} times too large")
    if end == "last":
        notes.defect(f"the statistic is that of the last {k} elements, not of the first")
    if statistic.eps_of_max:
        notes.defect(f"eps is not rescaled with x / max|x|: it acts as {statistic.eps:.3g} max|x|^2")
    model = Model(
        variant, centred=form.centred, divisor=statistic.divisor, last=end == "last", eps_of_max=statistic.eps_of_max,
        gain_first=form.gain_first, factor=statistic.factor, gate=form.gate,
    )  # fmt: skip
    return model, kind


def _partial(session: Session, variant: Variant, k: int, end: str, notes: Notebook) -> Variant:
    single = len(session.layout.axes) == 1 and not session.layout.group

    def measure(n: int) -> int | None:
        resized = _resized(session, n) if single else None
        try:
            return None if resized is None else counted(resized)[0]
        except (NotRms, TargetError):  # such as the variance of one element
            return None

    found = solve_partial({session.n: k}, measure)
    text = ", ".join(f"{count} of {n}" for n, count in found.seen.items())
    notes.found("partial", float(found.p), f"the {end} elements that change the others: {text}")
    if found.rounding is None:
        notes.unseen("partial_rounding", f"ceil and floor give the k that was seen: {text}")
    else:
        notes.found("partial_rounding", found.rounding, f"k = {found.rounding}(n p) at every width")
    if found.floating:
        notes.defect(f"k = {found.rounding}(n p) is computed in floating point: {text}")
    variant = variant.replace(partial=found.p, partial_rounding=found.rounding or "ceil")
    return variant if variant.counted(session.n) == k else variant.replace(partial=Fraction(k, session.n))


def _resized(session: Session, n: int) -> Session | None:
    """The session of the same target with rows of another width."""
    target = session.target
    if target.width is not None:
        if target.resized is None:
            return None
        try:
            target = target.resized(n)
        except ValueError:
            return None
    (axis,) = session.layout.axes
    sizes = tuple(n if place == axis else size for place, size in enumerate(session.layout.sizes))
    return replace(session, target=target, layout=replace(session.layout, sizes=sizes))


def _eps(session: Session, form: Form, statistic: Statistic, k: int, notes: Notebook) -> tuple[tuple[str, float], ...]:
    """eps in each dtype: one number, or the machine epsilon of the arithmetic; returned where 16 bits have another."""
    notes.found("eps_position", statistic.position, statistic.story)
    if statistic.eps == 0:
        notes.unseen("eps_position", "eps is 0")
    found = {session.wide: statistic.eps}
    for dtype in session.accepts:
        if dtype == session.wide or statistic.eps_of_max:
            continue
        noise = statistic.noise if dtype == "float64" else max(statistic.noise, 4 * dtypes.unit_roundoff(
            "float32" if dtype == "float64" else dtype))  # fmt: skip
        value, place, _ = solve_eps(replace(session, wide=dtype), form, noise, k)
        factor = statistic.factor
        value *= factor**2 if place == "inside" else factor
        if place == statistic.position and value:
            found[dtype] = nice(value, noise)
    wide = {dtype: value for dtype, value in found.items() if dtype not in dtypes.HALF}
    single = wide.get("float32", next(iter(wide.values()), statistic.eps))
    machine = dtypes.epsilon("float32")
    text = statistic.story
    if single == machine and wide.get("float64", dtypes.epsilon("float64")) in (dtypes.epsilon("float64"), machine):
        if wide.get("float64") == machine and notes["float64"] is None and session.wide == "float64":
            notes.found("eps", machine, text + "; float64 has the same")
        else:
            notes.found("eps", "machine epsilon", f"{machine:.4g} in float32" + (
                f", {wide['float64']:.4g} in float64" if "float64" in wide else "") + "; " + text)  # fmt: skip
    else:
        notes.found("eps", statistic.eps, text)
    narrow = {dtype: value for dtype, value in found.items() if dtype in dtypes.HALF}
    if not single or abs(narrow.get("bfloat16", single) / single - 1) < 0.1:
        return ()  # in float16 alone it is the eps itself, or the square, that has become subnormal
    for dtype, value in narrow.items():
        named = ", its machine epsilon," if value == dtypes.epsilon(dtype) else ""
        notes.found(f"eps in {dtype}", value, f"solved from {dtype} rows; {single:.3g} in wider dtypes")
        notes.defect(f"eps is {value:.3g}{named} for {dtype} x, and {single:.3g} in wider dtypes")
    return tuple(narrow.items())


def _named(model: Model, numerics: Numerics, notes: Notebook) -> Variant:
    """The solved variant, under the name of the first preset that has every field that was seen."""
    variant = model.variant.replace(rounding=numerics.rounding or "after_scale", result_dtype=numerics.result or "x")
    unseen = {name for name in ("scale_offset", "rounding", "result_dtype", "partial_rounding", "eps_position")
              if name in notes.findings and notes[name] is None}  # fmt: skip
    if variant.partial is None:
        unseen.add("partial_rounding")
    for free in (unseen, unseen | {"bias"}):
        seen = [name for name in FIELDS if name not in free]
        for preset in PRESETS.values():
            if all(getattr(preset, name) == getattr(variant, name) for name in seen):
                return preset.replace(**{name: getattr(variant, name) for name in (*seen, "bias")})
    return variant
