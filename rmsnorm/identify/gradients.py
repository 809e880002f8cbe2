"""Gradients: do dx, dscale, dbias and dgate agree with those of the model, and if not, which mistake explains them?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rmsnorm import dtypes
from rmsnorm.accuracy.bounds import FORMULA, OWN_GRADIENT, STEP, STEP_OF_FLOAT32, bound
from rmsnorm.accuracy.rounding import cast
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.call import Spec, resolve
from rmsnorm.identify.findings import Findings, Learned, not_observable
from rmsnorm.identify.form import Form
from rmsnorm.identify.layout import Layout
from rmsnorm.identify.model import Model
from rmsnorm.identify.session import Session
from rmsnorm.numpy_impl import rms_norm_vjp
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError

_NAMES = ("dx", "dscale", "dbias")
Gradients = tuple[Array | None, Array | None, Array | None]


@dataclass(frozen=True)
class Problem:
    """x, parameters and dy as the target takes them, with its other arguments."""

    x: Array
    scale: Array | None
    bias: Array | None
    dy: Array
    others: dict[str, Array]

    def golden(self, layout: Layout) -> tuple[tuple[Array | None, ...], dict[str, Any]]:
        """(dy, x, scale, bias) in shapes that the golden takes, and its axes."""
        shape, axes, features = self.x.shape, layout.axes, layout.feature_axes
        if layout.group:
            shape = (*shape[:-1], shape[-1] // layout.group, layout.group)
            axes, features = (len(shape) - 1,), (len(shape) - 2, len(shape) - 1)
        sizes = [shape[axis] for axis in features]
        parameters = (None if p is None else p.reshape(sizes) for p in (self.scale, self.bias))
        return (self.dy.reshape(shape), self.x.reshape(shape), *parameters), {"axis": axes, "feature_axis": features}

    def own_shape(self, name: str, gradient: Array) -> Array:
        """A gradient in the target's own shape."""
        own = {"dx": self.x, "dscale": self.scale, "dbias": self.bias}[name]
        assert own is not None  # noqa: S101  (only what the target takes has a gradient)
        return gradient.reshape(own.shape)


def solve_gradients(session: Session, model: Model, form: Form, findings: Findings) -> None:
    """Compare the gradients with the golden's, or with differences of the model where no Variant describes it."""
    target = session.target
    if not target.differentiable:
        findings.gradients = not_observable(f"{target.framework} has no automatic differentiation")
        return
    dtype = "float32" if "float32" in session.accepts else session.accepts[0]
    problem = _pose(session, dtype)
    try:
        gradients = target.gradients(problem.x, problem.scale, problem.bias, problem.dy, **problem.others)
    except TargetError as error:
        findings.gradients = Learned("raise", str(error))
        findings.defect(f"its gradient cannot be taken: {error}")
        return
    if not model.plain or (problem.scale is not None and problem.scale.size < session.n):
        _by_differences(session, model, form, problem, gradients, findings)
    else:
        _by_golden(session, model, form, problem, gradients, findings)


def solve_gate_gradient(session: Session, model: Model, findings: Findings) -> None:
    """Compare the gradients for a gate that is an input, and for x beside it, with differences of the model."""
    target, gate = session.target, model.gate
    if not target.differentiable or gate is None or gate.vector:
        return
    dtype = "float32" if "float32" in session.accepts else session.accepts[0]
    problem = _pose(session, dtype, with_gate=True)
    parameters = {name: p for name, p in (("scale", problem.scale), ("bias", problem.bias)) if p is not None}
    try:
        gradients = target.all_gradients(problem.dy, x=problem.x, **parameters, **problem.others)
    except TargetError as error:
        findings.defect(f"with a gate, its gradient cannot be taken: {error}")
        return
    mistakes, allowed = [], max(FORMULA, 4 * dtypes.unit_roundoff(dtype))
    for name, words in (("gate", "the gate"), ("x", "x")):
        got = gradients.get(name)
        if got is None:
            mistakes.append(f"there is no gradient for {words}")
        elif not np.any(got):
            mistakes.append(f"the gradient for {words} is 0")
        elif (off := _off(name, got, session, model, problem)) > allowed and not _is_its_own(
            f"d{name}", got, session, problem
        ):
            mistakes.append(
                _known_mistake(name, got, gradients.get("x"), session, model, problem)
                or f"the gradient for {words} is wrong by {100 * off:.2g} %, against differences with a gate"
            )
    for mistake in mistakes:
        findings.defect(mistake)
    evidence = f"{dtypes.short(dtype)}: dgate and dx against differences, for gates from -3 to 3"
    findings.gate_gradient = Learned("wrong" if mistakes else "agrees", "; ".join([evidence, *mistakes]))


def _known_mistake(
    name: str, got: Array, dx: Array | None, session: Session, model: Model, problem: Problem
) -> str | None:
    """Whether something else than the derivative of the gate's function multiplies the rest of dgate."""
    gate, layout, count = model.gate, session.layout, problem.x.size // session.n
    if name != "gate" or gate is None or dx is None:
        return None
    x, v, z, along, dz = (
        layout.to_rows(t.astype(np.float64), count) for t in (problem.x, problem.dy, problem.others["gate"], dx, got)
    )
    f = gate(x, z)
    spread = [None if p is None else layout.spread(p.astype(np.float64), count) for p in (problem.scale, problem.bias)]
    with np.errstate(all="ignore"):
        rest = along / f * x if gate.position == "before" else v * model.predict(x, spread[0], spread[1], None)
        for words, factor in ((f"{gate.activation}(gate)", f), ("sigmoid(gate)", 1 / (1 + np.exp(-z)))):
            if _close(dz, rest * factor, "dx"):
                return f"the gradient for the gate takes {words} for the derivative of {gate.activation}"
    return None


def _by_golden(
    session: Session, model: Model, form: Form, problem: Problem, gradients: Gradients, findings: Findings
) -> None:
    variant = model.variant
    (dy, *primals), axes = problem.golden(session.layout)
    golden = dict(zip(_NAMES, rms_norm_vjp(dy, *primals, variant=variant, **axes), strict=True))
    units = term_sizes(*primals, dy=dy, tangents=(primals[0], None, None), variant=variant, **axes)  # type: ignore[arg-type]
    specs = [None if p is None else Spec(p.shape, p.dtype.name) for p in primals]
    call = resolve("identify", *specs, variant=variant, **axes)  # type: ignore[arg-type]
    ignored = [name for name, applied in (("dscale", form.gain.applied), ("dbias", form.bias)) if not applied]
    comparisons, agree = [], True
    for name, got in zip(_NAMES, gradients, strict=True):
        if golden[name] is None or name in ignored:
            continue
        want = problem.own_shape(name, golden[name])
        mistake = _mistake(name, got, want, session, model, problem)
        if mistake and got is not None and _is_its_own(name, got, session, problem):
            comparisons.append(f"{name} within {OWN_GRADIENT:.0%} of differences of the target itself")
            continue
        if mistake:
            findings.defect(mistake)
            comparisons.append(f"{name}: {mistake}")
            agree = False
            continue
        assert got is not None  # noqa: S101  (a missing one is a mistake)
        dtype = want.dtype.name
        unit = problem.own_shape(name, units[name]) * dtypes.unit_roundoff(dtype)
        error = np.abs(got.astype(np.float64) - want.astype(np.float64))
        ratio = float(np.max(error / np.maximum(unit, 1e-300), initial=0))
        allowed = bound(name, call, dtype).ratio
        comparisons.append(f"{name} within {ratio:.2g} u of its terms (the kit allows {allowed:.2g})")
    compared = f"{dtypes.short(problem.x.dtype.name)}: " + "; ".join(comparisons)
    findings.gradients = Learned("agree" if agree else "wrong", compared)


def _pose(session: Session, dtype: str, *, with_gate: bool = False) -> Problem:
    """Rows of very different size, so that eps matters, with random parameters and dy, and a random or neutral gate."""
    random = np.random.default_rng(14)
    count = session.row_count(24)
    rows = random.normal(0.1, 1.0, (count, session.n)) * 10.0 ** random.uniform(-3.5, 1.5, (count, 1))
    if not session.layout.unlimited:
        rows = rows[: session.layout.rows_per_example]
        count = len(rows)
    values: dict[str, Any] = {}
    if session.takes("scale"):
        values["scale"] = session.parameter("scale", random, -1.5, 1.5)
    if session.takes("bias"):
        values["bias"] = session.parameter("bias", random, -1, 1)
    if with_gate:
        values["gate"] = random.uniform(-3, 3, rows.shape)
    x, others = session.prepare(rows if with_gate else rows / session.lift, dtype, None, **values)
    scale, bias = others.pop("scale", None), others.pop("bias", None)
    dy = cast(random.normal(0.1, 1.0, x.shape), dtype)
    return Problem(x, scale, bias, dy, others)


def _is_its_own(name: str, got: Array, session: Session, problem: Problem) -> bool:
    """Whether a gradient is that of what the target computes, by central differences of the target, row by row."""
    values = {"dx": problem.x, "dscale": problem.scale, "dbias": problem.bias, "dgate": problem.others.get("gate")}
    value = values[name]
    if value is None or got.shape != value.shape or not np.all(np.isfinite(got.astype(np.float64))):
        return False
    layout, count = session.layout, problem.x.size // session.n

    def summed(terms: Array) -> Array:
        in_rows = name in ("dx", "dgate")
        return layout.to_rows(terms, count).sum(-1) if in_rows else np.sum(terms, keepdims=True).reshape(1)

    random = np.random.default_rng(23)
    for direction in (
        value.astype(np.float64),
        *(random.uniform(-1, 1, value.shape) * np.abs(value) for _ in range(3)),
    ):
        ends = [(value + sign * STEP_OF_FLOAT32 * direction).astype(value.dtype) for sign in (1, -1)]
        try:
            moved = [_forward(session, problem, {name[1:]: end}) for end in ends]
        except TargetError:
            return False
        along = problem.dy.astype(np.float64) * (moved[0].astype(np.float64) - moved[1].astype(np.float64))
        terms = got.astype(np.float64) * (ends[0].astype(np.float64) - ends[1].astype(np.float64))
        size = summed(np.abs(along)) + summed(np.abs(terms))
        if np.any(np.abs(summed(along) - summed(terms)) > OWN_GRADIENT * size):
            return False
    return True


def _forward(session: Session, problem: Problem, moved: dict[str, Array]) -> Array:
    values = {"x": problem.x, "scale": problem.scale, "bias": problem.bias, **problem.others, **moved}
    return session.target.forward(values.pop("x"), **values)  # type: ignore[arg-type]


def _mistake(name: str, got: Array | None, want: Array, session: Session, model: Model, problem: Problem) -> str | None:
    """The sentence on a gradient that is wrong, None for one that agrees."""
    words = {"dx": "x", "dscale": "the gain", "dbias": "the bias"}[name]
    if got is None:
        return f"there is no gradient for {words}"
    if got.shape != want.shape:
        return f"the gradient for {words} has shape {got.shape}, expected {want.shape}"
    wide = got.astype(np.float64)
    if _close(wide, want.astype(np.float64), name):
        return None
    if not np.any(wide):
        return f"the gradient for {words} is 0"
    if not np.all(np.isfinite(wide)):
        return f"the gradient for {words} is not finite"
    for sentence, other in _suspects(name, session, model, problem).items():
        if _close(wide, other, name):
            return sentence
    worst = float(np.max(np.abs(wide - want)) / np.max(np.abs(want)))
    return f"the gradient for {words} is wrong by {100 * worst:.2g} % of its largest element"


def _close(a: Array, b: Array, name: str) -> bool:
    """By rows for dx, whose rows have very different sizes."""
    size = np.max(np.abs(b), axis=-1, keepdims=True) if name == "dx" and b.ndim > 1 else np.max(np.abs(b), initial=0.0)
    return bool(np.all(np.abs(a - b) <= FORMULA * np.maximum(size, 1e-30)))


def _suspects(name: str, session: Session, model: Model, problem: Problem) -> dict[str, Array]:
    """The gradients that usual mistakes give, by the sentence that names the mistake."""
    layout, count = session.layout, problem.x.size // session.n
    h, v = (layout.to_rows(t.astype(np.float64), count) for t in (problem.x, problem.dy))
    gain = 1.0 if problem.scale is None else layout.spread(problem.scale.astype(np.float64), count)
    o = model.variant.scale_offset if problem.scale is not None else 0.0
    inverse = model.inverse_rms(h, model.eps_for(problem.x.dtype.name))
    u, normalised = v * (o + gain), h * inverse
    counted = model.counted(session.n)
    k = counted.sum()
    q = np.where(counted, h * h, 0.0).sum(-1, keepdims=True) / k

    def slope(u: Array, square: Array) -> Array:
        return np.where(counted, h, 0.0) * inverse * (u * h).sum(-1, keepdims=True) / k / square

    squares = {
        "inside": 1 / inverse**2,
        "outside": np.sqrt(q) / inverse,
        "clamp": np.where(np.sqrt(q) * inverse < 1, np.inf, q),
    }
    true = squares[model.variant.eps_position]
    parameter = problem.scale if name == "dscale" else problem.bias
    shape = () if parameter is None else parameter.shape

    def over_rows(terms: Array) -> Array:
        axes = tuple(axis for axis in range(problem.x.ndim) if axis not in layout.feature_axes)
        return layout.to_x(terms)[tuple(slice(size) for size in problem.x.shape)].sum(axis=axes).reshape(shape)

    if name == "dx":
        suspects = {
            "the gradient for x takes 1 / rho for a constant": u * inverse,
            "the gradient for x leaves eps out": u * inverse - slope(u, q),
            "the gradient for x leaves the gain out": v * inverse - slope(v, true),
            "the gradient for x leaves the offset of the gain out": v * gain * inverse - slope(v * gain, true),
            "the gradient for x is the gradient for y": v,
        }
        return {sentence: layout.to_x(rows) for sentence, rows in suspects.items()}
    if name == "dscale":
        return {
            "the gradient for the gain is that of x, not of the normalised x": over_rows(v * h),
            "the gradient for the gain is the gradient for the bias": over_rows(v),
            "the gradient for the gain is a mean over rows, not a sum": over_rows(v * normalised) / count,
        }
    return {"the gradient for the bias is a mean over rows, not a sum": over_rows(v) / count}


def _by_differences(
    session: Session, model: Model, form: Form, problem: Problem, gradients: Gradients, findings: Findings
) -> None:
    """Along random directions in each row: dx against a central difference of the model in float64."""
    got, dscale, dbias = gradients
    if got is None:
        findings.defect("there is no gradient for x")
        findings.gradients = Learned("wrong", "dx is missing")
        return
    worst = _off("x", got, session, model, problem)
    missing = [
        words
        for words, gradient, applied in (("the gain", dscale, form.gain.applied), ("the bias", dbias, form.bias))
        if gradient is None and applied
    ]
    for words in missing:
        findings.defect(f"there is no gradient for {words}")
    own = worst > FORMULA and _is_its_own("dx", got, session, problem)
    if own:
        worst = 0.0
    if worst > FORMULA:
        findings.defect(f"the gradient for x is wrong by {100 * worst:.2g} %, against differences")
    wrong, dtype = worst > FORMULA or bool(missing), dtypes.short(problem.x.dtype.name)
    evidence = f"{dtype}: dx against differences of the model, within {worst:.1g}"
    if own:
        evidence = f"{dtype}: dx within {OWN_GRADIENT:.0%} of differences of the target itself"
    findings.gradients = Learned("wrong" if wrong else "agree", evidence)


def _off(name: str, gradient: Array, session: Session, model: Model, problem: Problem) -> float:
    """How far the gradient for x or for the gate is from differences of the model along directions, as a share."""
    eps = model.eps_for(problem.x.dtype.name)
    model = replace(model, variant=model.variant.replace(eps=eps), narrow_eps=(), eps_scale=1.0)
    layout, count = session.layout, problem.x.size // session.n
    x, v, got = (layout.to_rows(t.astype(np.float64), count) for t in (problem.x, problem.dy, gradient))
    spread = [None if p is None else layout.spread(p.astype(np.float64), count) for p in (problem.scale, problem.bias)]
    z = problem.others.get("gate")
    gate = None if z is None else layout.to_rows(z.astype(np.float64), count)
    if "gate_vector" in problem.others:
        gate = layout.spread(problem.others["gate_vector"].astype(np.float64), count)
    size = np.sqrt(np.mean(x**2, axis=-1, keepdims=True)) if name == "x" else 1.0
    random = np.random.default_rng(15)
    worst = 0.0
    for _ in range(4):
        t = random.uniform(-1, 1, x.shape) * size
        ends = []
        for sign in (STEP, -STEP):
            moved = (x, gate if gate is None else gate + sign * t) if name == "gate" else (x + sign * t, gate)
            ends.append(model.predict(moved[0], spread[0], spread[1], moved[1]))
        along = (v * (ends[0] - ends[1])).sum(-1) / (2 * STEP)
        terms = np.abs(got * t).sum(-1) + np.abs(along)
        worst = max(worst, float(np.max(np.abs((got * t).sum(-1) - along) / np.maximum(terms, 1e-30))))
    return worst
