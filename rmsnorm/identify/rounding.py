"""The dtypes of the statistic, of the product and of y, and where results are rounded."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rmsnorm.accuracy.bounds import SAME_BITS, of_row
from rmsnorm.accuracy.rounding import rounded
from rmsnorm.identify.model import Model, Stages
from rmsnorm.identify.probe import Answer, Probe
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import ResultDtype, Rounding, ScaleDtype, Variant
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError

PAIRS: Final = (
    ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32"), ("float64", "float64"),
    ("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16"),
    ("float64", "float32"),
)  # fmt: skip
_RULES: Final[tuple[ResultDtype, ...]] = ("x", "promote", "scale", "half_scale")
# what real code rounds before the product with x; other choices are taken for arithmetic in the dtype of x throughout
_STAGES: Final = (("squares",), ("mean",), ("rho",), ("inverse",), ("squares", "mean"))
Pair = tuple[str, str]  # dtypes of x and of the gain
Scores = dict[Rounding, dict[Pair, float]]


@dataclass(frozen=True)
class Numerics:
    """How the target rounds.

    Attributes:
        stages: by dtype of x, the intermediate results that are narrow; None where none is.
        rounding, result: as in a Variant; None where they are not observable.
        results: dtype of y for each pair of dtypes of x and gain that it takes.
        gain_rounded: o + gain is rounded to the dtype of the gain.
        scale_dtype: as in a Variant.
    """

    stages: dict[str, Stages | None]
    rounding: Rounding | None
    result: ResultDtype | None
    results: dict[Pair, str]
    gain_rounded: bool = False
    scale_dtype: ScaleDtype = "own"


def solve_stages(probe: Probe, model: Model) -> dict[str, Stages | None]:
    """For each dtype of x: the fewest narrow stages of 1 / rho that explain y."""
    solved = [(dtype, _stages(probe, model, dtype)) for dtype in probe.accepts]
    by_dtype = dict(sorted(solved, key=lambda entry: entry[1] == _unknown(entry[0])))
    _report_stages(probe, by_dtype)
    return by_dtype


def _unknown(dtype: str) -> Stages:
    """What stands for arithmetic in the dtype of x, in an unknown order, which no choice of stages explains."""
    return Stages(dtype, ("squares", "mean", "inverse"))


def explained(stages: Stages | None, dtype: str) -> bool:
    """Whether narrow stages were solved that explain y for x in 32 or 64 bits: confirm rounds elsewhere."""
    return stages is not None and dtype not in dtypes.HALF and stages != _unknown(dtype)


def whole(stages: Stages | None, dtype: str) -> bool:
    """Whether 1 / rho is computed in the dtype of x throughout."""
    return stages is not None and (stages == _unknown(dtype) or stages == Stages(dtype, ("rho",)))


def _stages(probe: Probe, model: Model, dtype: str) -> Stages | None:
    rows = _telling_rows(probe, dtype)
    y = probe.rows(rows / probe.gate_scale, dtype)
    x, y = rows.astype(dtype), y.astype(np.float64) / probe.factor
    if model.centred or not np.all(np.isfinite(y)):
        return None
    narrow = [
        name for name in ("bfloat16", "float16", "float32") if dtypes.unit_roundoff(name) >= dtypes.unit_roundoff(dtype)
    ]
    if dtype == "float64":
        narrow.remove("float32")  # reported as the dtype of the statistic
    narrow.sort(key=lambda name: name != dtype)
    choices = [Stages(name, names) for names in _STAGES for name in narrow]
    for arithmetic in ("float64", "float32") if dtype == "float64" else ("float32",):
        low, high = _bounds(x.astype(np.float64), y, dtype, probe.n, arithmetic)
        for stages in (None, *choices) if np.all(low <= high) else ():
            with np.errstate(all="ignore"):
                inverse = model.inverse_rms(x, model.eps_for(dtype), stages)[:, 0] * model.factor
            if np.all((low <= inverse) & (inverse <= high)):
                return stages
    return _unknown(dtype)


def _telling_rows(probe: Probe, dtype: str) -> Array:
    """Rows whose squares all err to one side when they are rounded to 16 bits, and random ones."""
    random = np.random.default_rng(10)
    half = probe.row_count(16)
    shape = (2 * half, probe.n)
    rows = random.uniform(0.25, 2.0, shape) * random.choice([-1.0, 1.0], shape)
    narrow = dtype if dtype in dtypes.HALF else "bfloat16"
    grid = np.unique(rounded(np.linspace(1, 2, 512), narrow))
    errors = rounded(grid**2, narrow) / grid**2 - 1
    order = np.argsort(errors)
    low = half // 2
    rows[half:, ::2] = grid[np.concatenate([order[:low], order[low - half :]])][:, None]
    return rounded(rows, dtype)


def _bounds(x: Array, y: Array, dtype: str, n: int, arithmetic: str) -> tuple[Array, Array]:
    """The numbers between which 1 / rho of each row must lie, for y to be x / rho in one rounding."""
    with np.errstate(all="ignore"):
        if dtype in dtypes.HALF and np.array_equal(rounded(y, dtype), y):
            exponent = np.frexp(y)[1] - 1
            half = 2.0**exponent * dtypes.unit_roundoff(dtype)
            half = np.maximum(half, dtypes.smallest_subnormal(dtype) / 2)
            slack = 2.0**-19  # of float32 arithmetic
        else:
            half = np.zeros_like(y)
            slack = of_row(n, arithmetic)
        edges = np.stack([(y - half) / x, (y + half) / x])
    low, high = np.min(edges, axis=0), np.max(edges, axis=0)
    return np.max(low, axis=-1) * (1 - slack), np.min(high, axis=-1) * (1 + slack)


def _report_stages(probe: Probe, by_dtype: dict[str, Stages | None]) -> None:
    findings = probe.findings
    halves = [dtype for dtype in by_dtype if dtype in dtypes.HALF]
    if halves and all(whole(by_dtype[dtype], dtype) for dtype in halves):
        findings.add("statistic_dtype", "that of x", "1 / rho is what arithmetic in 16 bits gives, step by step")
        return
    if not halves:
        findings.add("statistic_dtype", None, "it takes no 16-bit x")
    elif not any(by_dtype[dtype] for dtype in halves):
        findings.add("statistic_dtype", "float32 or wider", "the exact 1 / rho explains every element of 16-bit y")
    for dtype, stages in by_dtype.items():
        if stages is None:
            continue
        if stages == _unknown(dtype):
            findings.defect(f"for {dtype} x, 1 / rho has a larger error than float32 arithmetic gives")
            continue
        listed = _listed(stages)
        verb = "are" if "squares" in stages.names else "is"
        findings.defect(f"for {dtype} x, {listed} {verb} rounded to {stages.dtype}{_before(stages, dtype)}")
        if dtype in halves:
            evidence = "the only roundings that explain 16-bit y"
            findings.add("statistic_dtype", f"{listed} in {stages.dtype}", evidence)


def _listed(stages: Stages) -> str:
    words = {"squares": "the squares", "mean": "the mean square", "rho": "rho", "inverse": "1 / rho"}
    return " and ".join(words[name] for name in stages.names)


def _before(stages: Stages, dtype: str) -> str:
    """Before which step a single stage is rounded, where that is known."""
    if stages == Stages(dtype, ("squares",)):
        return ", before the cast to float32"
    return " before the product with x" if stages.names == ("inverse",) else ""


def solve_rounding(probe: Probe, model: Model, stages: dict[str, Stages | None]) -> Numerics:
    """Predict y for every pair of dtypes, rounded before the gain and after, and see which has its bits."""
    answers = _answers(probe)
    results = {pair: answer.y.dtype.name for pair, answer in answers.items()}
    rule = _result_rule(probe, results)
    halves = [dtype for dtype in stages if dtype in dtypes.HALF]
    if halves and all(whole(stages[dtype], dtype) for dtype in halves):
        probe.findings.add("rounding", "input_dtype", "every operation is rounded to the dtype of x")
        return Numerics(stages, "input_dtype", rule, results)

    def score(rule: ResultDtype | None, gain_rounded: bool, scale_dtype: ScaleDtype) -> Scores:
        scores: Scores = {}
        for rounding in ("before_scale", "after_scale"):
            variant = model.variant.replace(rounding=rounding, result_dtype=rule or "x", scale_dtype=scale_dtype)
            trial = replace(model, variant=variant, gain_rounded=gain_rounded)
            scores[rounding] = {
                pair: _identical(trial, stages.get(pair[0]), answer)
                for pair, answer in answers.items()
                if {pair[0], results[pair]} & set(dtypes.HALF)
            }
        return scores

    # the usual one first, which is kept where none explains the bits
    tried: list[tuple[ResultDtype | None, bool, ScaleDtype]] = [(rule, False, "own")]
    tried += [(rule, True, "own")] if model.variant.scale_offset else []
    tried += [("promote_first", False, "own")] if rule == "promote" else []
    tried += [(rule, False, "x")] if probe.takes("scale") else []
    scored = {}
    for chosen in tried:
        scored[chosen] = score(*chosen)
        if max(min(shares.values(), default=1.0) for shares in scored[chosen].values()) >= SAME_BITS:
            break
    else:
        chosen = tried[0]
    if chosen[1]:
        probe.findings.defect(f"{model.variant.scale_offset:g} + gain is rounded to the dtype of the gain")
    if chosen[0] != rule:
        known = "" if (finding := probe.findings["result_dtype"]) is None else f"{finding.evidence}; "
        probe.findings.add("result_dtype", "promote_first", f"{known}x / rho is rounded to the dtype of y, too")
    if chosen[2] == "x":
        probe.findings.add("scale_dtype", "x", "16-bit y has the bits of a gain that is cast to the dtype of x first")
    return _decided(probe, Numerics(stages, None, chosen[0], results, *chosen[1:]), scored[chosen])


def _answers(probe: Probe) -> dict[Pair, Answer]:
    """y of random rows and parameters for every pair of dtypes that the target takes."""
    random = np.random.default_rng(11)
    rows = random.normal(size=(probe.row_count(48), probe.n))
    values = probe.draw(random, "scale", "bias")
    pairs = [pair for pair in PAIRS if pair[0] in probe.accepts and ("scale" in values or pair[0] == pair[1])]
    if probe.takes("gate_vector"):
        values["gate_vector"] = np.zeros(1)
    if probe.takes("gate") and probe.neutral_parameters["gate"] is not None:
        values["gate"] = np.full(rows.shape, probe.neutral_parameters["gate"])
    answers = {}
    for pair in pairs:
        with contextlib.suppress(TargetError):
            answers[pair] = probe.answer(rounded(rows, pair[0]) / probe.gate_scale, pair, values)
    return answers


def _identical(model: Model, stages: Stages | None, answer: Answer) -> float:
    """The share of y that has the bits of the prediction; in wider dtypes than 16 bits, nearly."""
    at, y = answer
    want = model.predict(at, stages, y.dtype.name).astype(np.float64)
    got = y.astype(np.float64)
    slack = 0.0 if y.dtype.name in dtypes.HALF else of_row(at.x.shape[-1], "float32")
    alike = (np.abs(got - want) <= slack * model.terms(at)) | (np.isnan(got) & np.isnan(want))
    return float(np.mean(alike))


def _decided(probe: Probe, numerics: Numerics, scores: Scores) -> Numerics:
    least = {rounding: min(shares.values(), default=0.0) for rounding, shares in scores.items()}
    best: Rounding = max(least, key=lambda name: (least[name], name == "after_scale"))
    other: Rounding = "after_scale" if best == "before_scale" else "before_scale"
    shares = scores[best]
    if not shares:
        probe.findings.add("rounding", None, "it takes no 16-bit x")
        return numerics
    alike = abs(least[best] - least[other]) < 0.01 <= least[best] - 0.9
    if alike or not (probe.takes("scale") or probe.takes("bias")):
        probe.findings.add("rounding", None, "no step after x / rho can be rounded separately")
        return numerics
    if least[best] >= SAME_BITS or (any(numerics.stages.values()) and least[best] - least[other] > 0.1):
        pair = max(shares, key=lambda pair: shares[pair] - scores[other][pair])
        words: dict[Rounding, str] = {"before_scale": "before the gain", "after_scale": "once, after the gain"}
        probe.findings.add("rounding", best,
            f"{100 * shares[pair]:.5g} % of {dtypes.short(pair[0])} y with a {dtypes.short(pair[1])} gain has the bits "
            f"of y rounded {words[best]}; rounded {words[other]}: {100 * scores[other][pair]:.3g} %")  # fmt: skip
    else:
        most = f"{100 * least[best]:.3g} %"
        probe.findings.add("rounding", None, f"neither before nor after the gain explains the bits: {most} at most")
        probe.findings.defect(f"16-bit y is rounded in an unknown way: at most {most} of it can be predicted")
    return replace(numerics, rounding=best)


def _result_rule(probe: Probe, results: dict[Pair, str]) -> ResultDtype | None:
    """The rule that gives the dtype of y in all the pairs."""
    has_gain = probe.takes("scale")
    listed = ", ".join(
        f"{dtypes.short(t)} x{f' and {dtypes.short(g)} gain' if has_gain else ''}: {dtypes.short(y)}"
        for (t, g), y in results.items()
    )

    def ruled(rule: ResultDtype, t: str, g: str) -> str:
        gain, variant = Spec((1,), g) if has_gain else None, Variant(name="identified", result_dtype=rule)
        return resolve("identify", Spec((1,), t), gain, variant=variant).result_dtype

    fits = [rule for rule in _RULES if all(ruled(rule, *pair) == y for pair, y in results.items())]
    if len(fits) == 1:
        probe.findings.add("result_dtype", fits[0], listed)
        return fits[0]
    if fits:
        reason = "it takes no gain of another dtype" if has_gain else "there is no gain"
        probe.findings.add("result_dtype", None, f"{reason}, and y is of the dtype of x")
    elif len({*results.values()}) == 1 and len({t for t, _ in results}) > 1:
        (always,) = {*results.values()}
        probe.findings.add("result_dtype", f"always {always}", listed)
        if always != "float32" or {*dtypes.HALF} & {t for t, _ in results}:  # else it is a function of float32 alone
            probe.findings.defect(f"y is {always} whatever x is")
    else:
        probe.findings.add("result_dtype", "another rule", listed)
        probe.findings.defect(f"the dtype of y follows no known rule ({listed})")
    return None
