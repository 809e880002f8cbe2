"""Gradients: do dx, dscale, dbias and dgate agree with those of the model, and if not, which mistake explains them?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from rmsnorm.accuracy.bounds import DESCRIBED, FORMULA, OWN_GRADIENT, STEP, STEP_OF_FLOAT32
from rmsnorm.accuracy.rounding import cast
from rmsnorm.identify.model import Inputs, Model
from rmsnorm.identify.probe import Probe
from rmsnorm.numpy_impl import rms_norm_vjp
from rmsnorm.specification import dtypes
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError

_WORDS: Final = {"x": "x", "scale": "the gain", "bias": "the bias", "gate": "the gate"}
Gradients = Mapping[str, Array | None]  # by the name of the argument
Compared = tuple[list[str], str]  # sentences on mistakes, and the evidence


@dataclass(frozen=True)
class Problem:
    """A call of the target, the model of it, and a gradient dy of y.

    ``arrays`` has x, the parameters and the gate, by their names and as the target takes them.
    """

    probe: Probe
    model: Model
    arrays: Mapping[str, Array]
    dy: Array

    @property
    def dtype(self) -> str:
        return self.dy.dtype.name

    @property
    def count(self) -> int:
        return self.dy.size // self.probe.n

    def rows(self, array: Array) -> Array:
        """An array shaped as x as rows, in float64."""
        return self.probe.layout.to_rows(array.astype(np.float64), self.count)

    @cached_property
    def at(self) -> Inputs:
        """What ``arrays`` has at each element of the rows, in float64."""
        scale, bias, vector = (
            self.probe.layout.spread(self.arrays[name].astype(np.float64), self.count) if name in self.arrays else None
            for name in ("scale", "bias", "gate_vector")
        )
        gate = self.rows(self.arrays["gate"]) if vector is None and "gate" in self.arrays else vector
        return Inputs(self.rows(self.arrays["x"]), scale, bias, gate)

    @cached_property
    def formula(self) -> Model:
        """The model with the eps of this dtype, so that it can be asked in float64."""
        variant = self.model.variant.replace(eps=self.model.eps_for(self.dtype))
        return replace(self.model, variant=variant, narrow_eps=(), eps_scale=1.0)

    @cached_property
    def is_described(self) -> bool:
        """Whether y is that of the formula, but for roundings of 32 bits: then so is its derivative."""
        try:
            y = self.rows(self.probe.target.forward(**self.arrays))
        except TargetError:
            return False
        return self.dtype not in dtypes.HALF and _apart(y, self.formula.predict(self.at), "x") <= DESCRIBED

    def off(self, gradient: Array, name: str) -> float:
        """How far a gradient is from differences of the model along directions, as a share: in each row, or in all."""
        if name in ("scale", "bias"):
            return self._off_parameter(gradient.astype(np.float64), name)
        model, v, got, start = self.formula, self.rows(self.dy), self.rows(gradient), getattr(self.at, name)
        size = np.sqrt(np.mean(start**2, axis=-1, keepdims=True)) if name == "x" else 1.0
        random = np.random.default_rng(15)
        worst = 0.0
        for _ in range(4):
            t = random.uniform(-1, 1, start.shape) * size
            ends = [model.predict(self.at._replace(**{name: start + step * t})) for step in (STEP, -STEP)]
            along = (v * (ends[0] - ends[1])).sum(-1) / (2 * STEP)
            terms = np.abs(got * t).sum(-1) + np.abs(along)
            worst = max(worst, float(np.max(np.abs((got * t).sum(-1) - along) / np.maximum(terms, 1e-30))))
        return worst

    def _off_parameter(self, got: Array, name: str) -> float:
        """For the gain and the bias, whose gradients are sums over all rows."""
        start, v, random = self.arrays[name].astype(np.float64), self.rows(self.dy), np.random.default_rng(15)
        worst = 0.0
        for _ in range(4):
            t = random.uniform(0.5, 1, start.shape) * random.choice([-1, 1], start.shape)
            moved = [self.probe.layout.spread(start + step * t, self.count) for step in (STEP, -STEP)]
            ends = [self.formula.predict(self.at._replace(**{name: values})) for values in moved]
            along, terms = (v * (ends[0] - ends[1])).sum() / (2 * STEP), np.abs(got * t).sum()
            worst = max(worst, float(abs((got * t).sum() - along) / max(terms + abs(along), 1e-30)))
        return worst

    def is_own(self, gradient: Array, name: str) -> bool:
        """Whether it is that of what the target computes, by central differences of the target, row by row.

        These err by a percent, so they are asked only of a target whose y is not that of the formula.
        """
        value = self.arrays[name]
        if self.is_described or gradient.shape != value.shape or not np.all(np.isfinite(gradient.astype(np.float64))):
            return False

        def summed(terms: Array) -> Array:
            return self.rows(terms).sum(-1) if name in ("x", "gate") else np.sum(terms, keepdims=True).reshape(1)

        random = np.random.default_rng(23)
        directions = [random.uniform(-1, 1, value.shape) * np.abs(value) for _ in range(3)]
        for direction in (value.astype(np.float64), *directions):
            ends = [(value + sign * STEP_OF_FLOAT32 * direction).astype(value.dtype) for sign in (1, -1)]
            try:
                moved = [self.probe.target.forward(**{**self.arrays, name: end}) for end in ends]
            except TargetError:
                return False
            along = self.dy.astype(np.float64) * (moved[0].astype(np.float64) - moved[1].astype(np.float64))
            terms = gradient.astype(np.float64) * (ends[0].astype(np.float64) - ends[1].astype(np.float64))
            size = summed(np.abs(along)) + summed(np.abs(terms))
            if np.any(np.abs(summed(along) - summed(terms)) > OWN_GRADIENT * size):
                return False
        return True


def _pose(probe: Probe, model: Model, *, with_gate: bool = False) -> Problem:
    """Rows of very different size, so that eps matters, with random parameters and dy, and a random or neutral gate.

    In every second row dy * (o + gain) has the signs of x. The term of dx that is the sum of their products is then of
    the size of the other one; elsewhere it is about 1 / sqrt(n) of it, which no tolerance sees in wide rows.
    """
    random = np.random.default_rng(14)
    dtype = "float32" if "float32" in probe.accepts else probe.accepts[0]
    count = probe.row_count(24)
    rows = random.normal(0.1, 1.0, (count, probe.n)) * 10.0 ** random.uniform(-3.5, 1.5, (count, 1))
    if not probe.layout.unlimited:
        rows = rows[: probe.layout.rows_per_example]
    values = probe.draw(random, "scale", "bias")
    if with_gate:
        values["gate"] = random.uniform(-3, 3, rows.shape)
    x, arrays = probe.prepare(rows if with_gate else rows / probe.gate_scale, dtype, None, **values)
    problem = Problem(probe, model, {"x": x, **arrays}, cast(random.normal(0.1, 1.0, x.shape), dtype))
    at, dy = problem.at, problem.rows(problem.dy)
    gain = 1.0 if at.scale is None else model.variant.scale_offset + at.scale
    dy[::2] = (np.abs(dy) * np.where(at.x * gain < 0, -1.0, 1.0))[::2]
    return replace(problem, dy=cast(probe.layout.to_x(dy), dtype))


def solve_gradients(probe: Probe, model: Model) -> None:
    """Compare the gradients with the golden's, or with differences of the model where no Variant describes it."""
    target = probe.target
    if not target.differentiable:
        probe.findings.add("gradients", None, f"{target.framework} has no automatic differentiation")
        return
    problem = _pose(probe, model)
    try:
        gradients = target.all_gradients(problem.dy, **problem.arrays)
    except TargetError as error:
        probe.findings.add("gradients", "raise", str(error))
        probe.findings.defect(f"its gradient cannot be taken: {error}")
        return
    parameters = {"scale": probe.findings["gain"], "bias": probe.findings["bias"]}
    applied = [name for name, answer in parameters.items() if answer is not None and answer.value]
    scale = problem.arrays.get("scale")
    if model.plain and (scale is None or scale.size >= probe.n):
        mistakes, evidence = _by_golden(problem, gradients, applied)
    else:
        mistakes, evidence = _by_differences(problem, gradients, ["x", *_comparable(problem, gradients, applied)])
    probe.findings.defect(*mistakes)
    probe.findings.add("gradients", "wrong" if mistakes else "agree", evidence)


def gradient_mistakes(probe: Probe, model: Model) -> list[str]:
    """Sentences on the gradients for x, gain and bias that are not the golden's, for a model that a Variant describes.

    Raises:
        TargetError: the target, or its differentiation, raised.
    """
    problem = _pose(probe, model)
    gradients = probe.target.all_gradients(problem.dy, **problem.arrays)
    applied = [name for name in ("scale", "bias") if name in problem.arrays and gradients.get(name) is not None]
    scale = problem.arrays.get("scale")
    return _by_golden(problem, gradients, applied)[0] if scale is None or scale.size >= probe.n else []


def solve_gate_gradient(probe: Probe, model: Model) -> None:
    """Compare the gradients for a gate that is an input, and for x beside it, with differences of the model."""
    if not probe.target.differentiable or model.gate is None or model.gate.vector:
        return
    problem = _pose(probe, model, with_gate=True)
    try:
        gradients = probe.target.all_gradients(problem.dy, **problem.arrays)
    except TargetError as error:
        probe.findings.defect(f"with a gate, its gradient cannot be taken: {error}")
        return
    parameters = [name for name in ("scale", "bias") if name in problem.arrays and gradients.get(name) is not None]
    names = ["gate", "x", *_comparable(problem, gradients, parameters)]
    mistakes, evidence = _by_differences(problem, gradients, names)
    probe.findings.defect(*mistakes)
    probe.findings.add("gate_gradient", "wrong" if mistakes else "agrees", f"{evidence}, for gates from -3 to 3")


def _comparable(problem: Problem, gradients: Gradients, applied: Sequence[str]) -> list[str]:
    """The parameters with a gradient that differences can judge, or with none: a sum in 16 bits says too little."""
    shapes = {name: problem.arrays[name].shape for name in applied if name in problem.arrays}
    is_wide = problem.dtype not in dtypes.HALF
    return [
        name for name, shape in shapes.items()
        if (got := gradients.get(name)) is None or (is_wide and got.shape == shape)
    ]  # fmt: skip


def _by_differences(problem: Problem, gradients: Gradients, names: Sequence[str]) -> Compared:
    """Along random directions in each row: gradients against central differences of the model in float64."""
    mistakes, comparisons = [], []
    for name in names:
        got, mistake = gradients.get(name), ""
        if got is None:
            mistake = f"there is no gradient for {_WORDS[name]}"
        elif not np.any(got):
            mistake = f"the gradient for {_WORDS[name]} is 0"
        elif (share := problem.off(got, name)) <= max(FORMULA, 4 * dtypes.unit_roundoff(problem.dtype)):
            comparisons.append(f"d{name} within {share:.1g} of differences of the model")
        elif problem.is_own(got, name):
            comparisons.append(f"d{name} within {OWN_GRADIENT:.0%} of differences of the target itself")
        else:
            mistake = _known_mistake(problem, got, gradients.get("x")) if name == "gate" else ""
            mistake = mistake or f"the gradient for {_WORDS[name]} is wrong by {100 * share:.2g} %, against differences"
        mistakes += [mistake] if mistake else []
    return mistakes, f"{dtypes.short(problem.dtype)}: " + "; ".join([*comparisons, *mistakes])


def _known_mistake(problem: Problem, dgate: Array, dx: Array | None) -> str:
    """The sentence on what else than the derivative of the gate's function multiplies the rest of dgate, or nothing."""
    gate, (x, _, _, z) = problem.model.gate, problem.at
    if gate is None or dx is None or z is None:
        return ""
    f = gate(x, z)
    with np.errstate(all="ignore"):
        of_y = problem.rows(problem.dy) * problem.model.predict(problem.at._replace(gate=None))
        rest = problem.rows(dx) / f * x if gate.position == "before" else of_y
        for words, factor in ((f"{gate.activation}(gate)", f), ("sigmoid(gate)", 1 / (1 + np.exp(-z)))):
            if _apart(problem.rows(dgate), rest * factor, "x") <= FORMULA:
                return f"the gradient for the gate takes {words} for the derivative of {gate.activation}"
    return ""


def _by_golden(problem: Problem, gradients: Gradients, applied: Sequence[str]) -> Compared:
    """In shapes that the golden takes: groups have an axis of their own."""
    layout, variant = problem.probe.layout, problem.model.variant
    shape, axes, features = problem.dy.shape, layout.axes, layout.feature_axes
    if layout.group:
        shape = (*shape[:-1], shape[-1] // layout.group, layout.group)
        axes, features = (len(shape) - 1,), (len(shape) - 2, len(shape) - 1)
    sizes = [shape[axis] for axis in features]
    scale, bias = (
        problem.arrays[name].reshape(sizes) if name in problem.arrays else None for name in ("scale", "bias")
    )
    x, dy = problem.arrays["x"].reshape(shape), problem.dy.reshape(shape)
    options: dict[str, Any] = {"variant": variant, "axis": axes, "feature_axis": features}
    golden = dict(zip(("x", "scale", "bias"), rms_norm_vjp(dy, x, scale, bias, **options), strict=True))
    mistakes, comparisons = [], []
    for name in ("x", *applied):
        got = gradients.get(name)
        want = golden[name].reshape(problem.arrays[name].shape)
        mistake = _mistake(problem, name, got, want)
        if got is not None and not mistake:
            share = _apart(got.astype(np.float64), want.astype(np.float64), name)
            comparisons.append(f"d{name} within {share:.1g} of the golden's, as a share of its largest element")
        elif got is not None and problem.is_own(got, name):
            comparisons.append(f"d{name} within {OWN_GRADIENT:.0%} of differences of the target itself")
        else:
            mistakes.append(str(mistake))
    return mistakes, f"{dtypes.short(problem.dtype)}: " + "; ".join([*comparisons, *mistakes])


def _mistake(problem: Problem, name: str, got: Array | None, want: Array) -> str | None:
    """The sentence on a gradient that is wrong, None for one that agrees."""
    words = _WORDS[name]
    if got is None:
        return f"there is no gradient for {words}"
    if got.shape != want.shape:
        return f"the gradient for {words} has shape {got.shape}, expected {want.shape}"
    wide = got.astype(np.float64)
    if _apart(wide, want.astype(np.float64), name) <= FORMULA:
        return None
    if not np.any(wide):
        return f"the gradient for {words} is 0"
    if not np.all(np.isfinite(wide)):
        return f"the gradient for {words} is not finite"
    for sentence, other in _suspects(problem, name).items():
        if _apart(wide, other, name) <= FORMULA:
            return sentence
    worst = float(np.max(np.abs(wide - want)) / np.max(np.abs(want)))
    return f"the gradient for {words} is wrong by {100 * worst:.2g} % of its largest element"


def _apart(a: Array, b: Array, name: str) -> float:
    """The largest difference, as a share of the largest b; for dx by rows, which have very different sizes."""
    size = np.max(np.abs(b), axis=-1, keepdims=True) if name == "x" and b.ndim > 1 else np.max(np.abs(b), initial=0.0)
    return float(np.max(np.abs(a - b) / np.maximum(size, 1e-30), initial=0.0))


def _suspects(problem: Problem, name: str) -> dict[str, Array]:
    """The gradients that usual mistakes give, by the sentence that names the mistake."""
    layout, model, (h, scale, _, _), v = problem.probe.layout, problem.model, problem.at, problem.rows(problem.dy)
    gain: Any = 1.0 if scale is None else scale
    o = 0.0 if scale is None else model.variant.scale_offset
    inverse = model.inverse_rms(h, model.eps_for(problem.dtype))
    counted = model.counted(problem.probe.n)
    q = np.where(counted, h * h, 0.0).sum(-1, keepdims=True) / counted.sum()
    true = {
        "inside": 1 / inverse**2,
        "outside": np.sqrt(q) / inverse,
        "clamp": np.where(np.sqrt(q) * inverse < 1, np.inf, q),
    }[model.variant.eps_position]

    def of_x(u: Array, square: Array = true) -> Array:
        slope = np.where(counted, h, 0.0) * inverse * (u * h).sum(-1, keepdims=True) / counted.sum() / square
        return layout.to_x(u * inverse - slope)

    def over_rows(terms: Array) -> Array:
        axes = tuple(axis for axis in range(problem.dy.ndim) if axis not in layout.feature_axes)
        inside = layout.to_x(terms)[tuple(slice(size) for size in problem.dy.shape)]
        return np.asarray(inside.sum(axis=axes).reshape(problem.arrays[name].shape))

    if name == "x":
        return {
            "the gradient for x takes 1 / rho for a constant": layout.to_x(v * (o + gain) * inverse),
            "the gradient for x leaves eps out": of_x(v * (o + gain), q),
            "the gradient for x leaves the gain out": of_x(v),
            "the gradient for x leaves the offset of the gain out": of_x(v * gain),
        }
    if name == "scale":
        return {
            "the gradient for the gain is that of x, not of the normalised x": over_rows(v * h),
            "the gradient for the gain is the gradient for the bias": over_rows(v),
        }
    return {}
