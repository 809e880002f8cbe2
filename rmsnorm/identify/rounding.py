"""In which dtypes the work is done: of the statistic, of the product, of y; and where it is rounded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

import numpy as np

from rmsnorm import dtypes
from rmsnorm.identify.findings import Notebook
from rmsnorm.identify.model import Model, Stages, rounded
from rmsnorm.identify.session import Session
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError
from rmsnorm.variants import ResultDtype, Rounding

PAIRS: Final = (
    ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32"), ("float64", "float64"),
    ("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16"),
    ("float64", "float32"),
)  # fmt: skip
_RULES: Final[tuple[ResultDtype, ...]] = ("x", "promote", "scale", "half_scale")
SHARE: Final = 0.99  # of identical bits: arithmetic in float32 moves 0.2 % of float16, a wrong rounding point 25 %


@dataclass(frozen=True)
class Numerics:
    """How the target rounds.

    Attributes:
        stages: by dtype of x, which intermediate results are narrow; None where none is.
        rounding, result: as in a Variant; None where they are not observable.
        results: dtype of y for each pair of dtypes of x and gain that it takes.
        exact: share of elements that equal the prediction bit for bit, by pair.
        gain_rounded: o + gain is rounded to the dtype of the gain.
    """

    stages: dict[str, Stages | None]
    rounding: Rounding | None
    result: ResultDtype | None
    results: dict[tuple[str, str], str]
    exact: dict[tuple[str, str], float]
    gain_rounded: bool = False


def solve_stages(session: Session, model: Model, notes: Notebook) -> dict[str, Stages | None]:
    """For each dtype of x: the fewest narrow stages of 1 / rho that explain y."""
    found: dict[str, Stages | None] = {}
    unknown: list[str] = []
    for dtype in session.accepts:
        stages = _stages(session, model, dtype)
        if stages == "unknown":
            unknown.append(dtype)
        else:
            found[dtype] = stages if isinstance(stages, Stages) else None
    for dtype in unknown:  # a sum in the dtype of x, in some order: taken for the whole chain in that dtype
        found[dtype] = Stages(dtype, squares=True, mean=True, inverse=True)
    _tell(session, found, unknown, notes)
    return found


def whole(stages: Stages | None, dtype: str) -> bool:
    """Whether 1 / rho is computed in the dtype of x throughout."""
    return bool(stages and stages.dtype == dtype and (stages.rho or (stages.mean and stages.inverse)))


def _stages(session: Session, model: Model, dtype: str) -> Stages | str | None:
    x = _telling_rows(session, dtype)
    y = session.rows(x / session.lift, dtype)
    x, y = x.astype(dtype), y.astype(np.float64) / session.factor
    eps = model.eps_for(dtype)
    if model.centred or not np.all(np.isfinite(y)):
        return None
    for arithmetic in ("float64", "float32") if dtype == "float64" else ("float32",):
        low, high = _bounds(x.astype(np.float64), y, dtype, session.n, arithmetic)
        found = _explain(model, x, eps, dtype, low, high)
        if found != "unknown":
            return found
    return "unknown"


def _explain(model: Model, x: Array, eps: float, dtype: str, low: Array, high: Array) -> Stages | str | None:
    if not np.all(low <= high):
        return "unknown"
    narrow = [
        name for name in ("bfloat16", "float16", "float32") if dtypes.unit_roundoff(name) >= dtypes.unit_roundoff(dtype)
    ]
    if dtype == "float64":
        narrow.remove("float32")  # said as the dtype of the statistic
    with np.errstate(all="ignore"):
        for stages in [None, *_choices(narrow, dtype)]:
            inverse = model.inverse_rms(x, eps, stages)[:, 0] * model.factor
            if np.all((low <= inverse) & (inverse <= high)):
                return stages
    return "unknown"


def _choices(narrow: Iterable[str], dtype: str) -> list[Stages]:
    every = [Stages(name, *flags) for name in narrow for flags in product((False, True), repeat=4) if any(flags)]
    return sorted(every, key=lambda stages: (stages.count, stages.dtype != dtype))


def _telling_rows(session: Session, dtype: str) -> Array:
    """Rows whose squares all err to one side when they are rounded to 16 bits, and random ones."""
    random = np.random.default_rng(10)
    half = session.few(16)
    shape = (2 * half, session.n)
    rows = random.uniform(0.25, 2.0, shape) * random.choice([-1.0, 1.0], shape)
    narrow = dtype if dtype in dtypes.HALF else "bfloat16"
    grid = np.unique(rounded(np.linspace(1, 2, 512), narrow))
    errors = rounded(grid**2, narrow) / grid**2 - 1
    order = np.argsort(errors)
    worst = np.concatenate([grid[order[: half // 2]], grid[order[-(half // 2) :]]])
    rows[half:, ::2] = worst[:, None]
    return rounded(rows, dtype)


def _bounds(x: Array, y: Array, dtype: str, n: int, arithmetic: str) -> tuple[Array, Array]:
    """Between which numbers 1 / rho of each row must lie, for y to be x / rho in one rounding."""
    with np.errstate(all="ignore"):
        if dtype in dtypes.HALF and np.array_equal(rounded(y, dtype), y):
            exponent = np.frexp(y)[1] - 1
            half = 2.0**exponent * dtypes.unit_roundoff(dtype)
            half = np.maximum(half, dtypes.smallest_subnormal(dtype) / 2)
            slack = 2.0**-19  # of float32 arithmetic
        else:
            half = np.zeros_like(y)
            slack = (16 + math.sqrt(n)) * dtypes.unit_roundoff(arithmetic)
        edges = np.stack([(y - half) / x, (y + half) / x])
    low, high = np.min(edges, axis=0), np.max(edges, axis=0)
    return np.max(low, axis=-1) * (1 - slack), np.min(high, axis=-1) * (1 + slack)


def _tell(session: Session, found: dict[str, Stages | None], unknown: list[str], notes: Notebook) -> None:
    halves = [dtype for dtype in found if dtype in dtypes.HALF]
    if halves and all(whole(found[dtype], dtype) for dtype in halves):
        notes.found("statistic_dtype", "that of x", "1 / rho is what arithmetic in 16 bits gives, step by step")
        return
    if not halves:
        notes.unseen("statistic_dtype", "it takes no 16-bit x")
    elif not any(found[dtype] for dtype in halves):
        notes.found("statistic_dtype", "float32 or wider", "the exact 1 / rho explains every element of 16-bit y")
    for dtype, stages in found.items():
        if stages is None:
            continue
        if dtype in unknown:
            notes.defect(f"for {dtype} x, 1 / rho errs by more than float32 arithmetic does")
            continue
        names = {"squares": "the squares", "mean": "the mean square", "rho": "rho", "inverse": "1 / rho"}
        parts = [text for name, text in names.items() if getattr(stages, name)]
        listed = " and ".join(parts)
        verb = "are" if parts[0] == "the squares" or len(parts) > 1 else "is"
        place = ", before the cast to float32" if parts == ["the squares"] and stages.dtype == dtype else ""
        place = " before the product with x" if parts == ["1 / rho"] else place
        notes.defect(f"for {dtype} x, {listed} {verb} rounded to {stages.dtype}{place}")
        if dtype in halves:
            notes.found("statistic_dtype", f"{listed} in {stages.dtype}", "the only roundings that explain 16-bit y")


def solve_rounding(session: Session, model: Model, stages: dict[str, Stages | None], notes: Notebook) -> Numerics:
    """Predict y for every pair of dtypes, rounded before the gain and after, and see which has its bits."""
    random = np.random.default_rng(11)
    count = session.few(48)
    rows = random.normal(size=(count, session.n))
    scale, bias = (session.parameter(role, random, *span) if session.has(role) else None
                   for role, span in (("scale", (-1.5, 1.5)), ("bias", (-1, 1))))  # fmt: skip
    given: dict[str, Any] = {role: p for role, p in (("scale", scale), ("bias", bias)) if p is not None}
    asked: dict[tuple[str, str], tuple[Any, ...]] = {}
    for pair in PAIRS if scale is not None else [pair for pair in PAIRS if pair[0] == pair[1]]:
        if pair[0] not in session.accepts:
            continue
        x = rounded(rows, pair[0]) if session.lift == 1 else rounded(rows, pair[0]) / session.lift
        try:
            y = session.rows(x, *pair, **given)
        except TargetError:
            continue
        asked[pair] = (x.astype(pair[0]), _as(session, scale, pair[1], count), _as(session, bias, pair[1], count), y)
    results = {pair: y.dtype.name for pair, (*_, y) in asked.items()}
    rule = _result(session, results, notes)
    halves = [dtype for dtype in stages if dtype in dtypes.HALF]
    if halves and all(whole(stages[dtype], dtype) for dtype in halves):
        notes.found("rounding", "input_dtype", "every operation is rounded to the dtype of x")
        return Numerics(stages, "input_dtype", rule, results, {})

    def score(model: Model) -> dict[Rounding, dict[tuple[str, str], float]]:
        scores: dict[Rounding, dict[tuple[str, str], float]] = {}
        for rounding in ("before_scale", "after_scale"):
            trial = replace(model, variant=model.variant.replace(rounding=rounding, result_dtype=rule or "x"))
            scores[rounding] = {
                pair: _identical(trial, session, stages.get(pair[0]), *arrays)
                for pair, arrays in asked.items()
                if {pair[0], results[pair]} & set(dtypes.HALF)
            }
        return scores

    scores = score(model)
    if model.variant.scale_offset and _best(scores) < SHARE:
        narrow = score(replace(model, gain_rounded=True))
        if _best(narrow) >= SHARE:
            notes.defect(f"{model.variant.scale_offset:g} + gain is rounded to the dtype of the gain")
            return replace(_decide(session, stages, rule, results, narrow, notes), gain_rounded=True)
    return _decide(session, stages, rule, results, scores, notes)


def _best(scores: dict[Rounding, dict[tuple[str, str], float]]) -> float:
    return max(min(shares.values(), default=1.0) for shares in scores.values())


def _as(session: Session, parameter: Array | None, dtype: str, count: int) -> Array | None:
    return None if parameter is None else session.spread(parameter.astype(dtype), count)


def _identical(
    model: Model, session: Session, stages: Stages | None, x: Array, scale: Array | None, bias: Array | None, y: Array
) -> float:
    gate = session.neutral.get("gate")
    z = None if gate is None or not session.has("gate") else np.full(x.shape, gate)
    if model.gate and model.gate.vector:
        z = np.zeros(x.shape)
    if not model.gate:
        z = None
    want = model.predict(x, scale, bias, z, stages=stages, result=y.dtype.name)
    got, want = y.astype(np.float64), want.astype(np.float64)
    terms = model.terms(x, scale, bias, z)
    slack = 0.0 if y.dtype.name in dtypes.HALF else (16 + math.sqrt(x.shape[-1])) * dtypes.unit_roundoff("float32")
    return float(np.mean((np.abs(got - want) <= slack * terms) | (np.isnan(got) & np.isnan(want))))


def _decide(
    session: Session,
    stages: dict[str, Stages | None],
    rule: ResultDtype | None,
    results: dict[tuple[str, str], str],
    scores: dict[Rounding, dict[tuple[str, str], float]],
    notes: Notebook,
) -> Numerics:
    least = {rounding: min(shares.values(), default=0.0) for rounding, shares in scores.items()}
    best: Rounding = max(least, key=lambda name: (least[name], name == "after_scale"))
    other: Rounding = "after_scale" if best == "before_scale" else "before_scale"
    shares = scores[best]
    if not shares:
        notes.unseen("rounding", "it takes no 16-bit x")
        return Numerics(stages, None, rule, results, {})
    if not (session.has("scale") or session.has("bias")) or abs(least[best] - least[other]) < 0.01 <= least[best] - 0.9:
        notes.unseen("rounding", "nothing comes after x / rho that could be rounded apart")
        return Numerics(stages, None, rule, results, shares)
    pair = max(shares, key=lambda pair: shares[pair] - scores[other][pair])
    words = {"before_scale": "before the gain", "after_scale": "once, after the gain"}
    if least[best] >= SHARE or (any(stages.values()) and least[best] - least[other] > 0.1):
        notes.found(
            "rounding", best,
            f"{100 * shares[pair]:.5g} % of {dtypes.short(pair[0])} y with a {dtypes.short(pair[1])} gain has the bits "
            f"of one that is rounded {words[best]}; rounded {words[other]} {100 * scores[other][pair]:.3g} %",
        )  # fmt: skip
        return Numerics(stages, best, rule, results, shares)
    notes.unseen("rounding", f"neither before nor after the gain explains the bits: {100 * least[best]:.3g} % at most")
    notes.defect(f"16-bit y is rounded in a way of its own: at most {100 * least[best]:.3g} % of it can be predicted")
    return Numerics(stages, best, rule, results, shares)


def _result(session: Session, results: dict[tuple[str, str], str], notes: Notebook) -> ResultDtype | None:
    """The rule that gives the dtype of y, from all the pairs."""
    text = ", ".join(
        f"{dtypes.short(t)} x{f' and {dtypes.short(g)} gain' if session.has('scale') else ''}: {dtypes.short(y)}"
        for (t, g), y in results.items()
    )
    fits = [
        rule
        for rule in _RULES
        if all(_dtype(rule, t, g if session.has("scale") else None) == y for (t, g), y in results.items())
    ]
    if not fits:
        found = set(results.values())
        one = len(found) == 1 and len({t for t, _ in results}) > 1
        notes.found("result_dtype", f"always {next(iter(found))}" if one else "another rule", text)
        notes.defect(
            f"the dtype of y follows no known rule ({text})" if not one else f"y is {next(iter(found))} whatever x is"
        )
        return None
    if len(fits) > 1:
        wide = "it takes no gain of another dtype" if session.has("scale") else "there is no gain"
        notes.unseen("result_dtype", f"{wide}, and y is of the dtype of x")
        return None
    notes.found("result_dtype", fits[0], text)
    return fits[0]


def _dtype(rule: ResultDtype, t: str, g: str | None) -> str:
    if g is None:
        return t
    if rule == "half_scale":
        return g if g in dtypes.HALF else dtypes.promote(t, g, "float32")
    return {"x": t, "promote": dtypes.promote(t, g), "scale": g}[rule]
