"""Where y is rounded, and its dtype: by the bits of y for each pair of dtypes of x and gain."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from rmsnorm.identify import mistakes
from rmsnorm.identify.asking import Answer, Probe
from rmsnorm.identify.candidates import ANY, HOLDS, HOLDS_FREELY, Candidate
from rmsnorm.identify.findings import NotRms
from rmsnorm.identify.fit import eps_of, nice
from rmsnorm.identify.mistakes import Mistake
from rmsnorm.parity.equations import Steps
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Variant
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError

PAIRS: Final = (  # of x and of the gain
    ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32"), ("float64", "float64"),
    ("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16"),
    ("float64", "float32"),
)  # fmt: skip
_RULES: Final = ("x", "promote", "scale", "half_scale")
_ONCE: Final = ("after_scale",)
_MOST: Final = 0.8  # of the rows from some size on
_TELLS: Final = 0.005  # of y: a wrong rounding point moves a quarter of it
_FREE: Final = 3.0  # roundings of 16 bits by which the 1 / rho of most rows errs where every step is rounded to them
_LARGE: Final = {"float16": 3.0, "bfloat16": 15.0, "float32": 15.0}  # powers of ten of x, whose squares float32 has
_ORDINARY: Final = (0.05, 25.0)  # sizes of rows whose squares, and 64 of them, float16 has
_LEAST: Final = {"float16": -6.0, "bfloat16": -16.0, "float32": -16.0, "float64": -16.0}  # powers of ten of x


def asked(probe: Probe, eps: float) -> list[Answer]:
    """y of random rows for every pair of dtypes: of ordinary size, of very different sizes, and of that of eps."""
    answers = []
    middle = max(np.log10(eps) * 0.5 if eps else -3.0, -15.5)
    for dtype, gain in PAIRS:
        if dtype not in probe.accepts or ("scale" not in probe.passes and dtype != gain):
            continue
        low = max(-3.5 if dtype in dtypes.HALF else min(-3.5, middle - 0.5), _LEAST[dtype])
        spans = [(low, 0.3 if dtype == "float16" else 1.5), (-0.3, 0.3)]
        if dtype == gain:
            spans.append((max(middle - 1.0, _LEAST[dtype]), max(middle, _LEAST[dtype] + 1.0)))
        for seed, span in enumerate(spans):
            with contextlib.suppress(TargetError):
                answers.append(probe.answer(11 + seed, dtype, gain, sizes=span, far=seed == 0))
    return answers


def solve_roundings(probe: Probe, known: Candidate) -> tuple[Candidate, bool]:
    """The candidate with the roundings and the dtype of y that give its bits, and whether it predicts all of y."""
    answers = asked(probe, known.variant.eps_for("float32"))
    rule, known = _with_result(probe, known, answers)
    narrow = [answer for answer in answers if {answer.dtype, answer.y.dtype.name} & {*dtypes.HALF}]
    grid = list(_grid(known, rule or "x", has_gain="scale" in probe.passes))
    scores = {each.variant: [each.score(probe, answer) for answer in narrow] for each in grid}

    def worth(candidate: Candidate) -> tuple[bool, bool, float]:
        own = scores[candidate.variant]
        usual = candidate.variant.scale_dtype == "own"
        return min(own, default=1.0) >= HOLDS, usual, round(float(np.mean(own)), 6) if own else 1.0

    best = max(grid, key=worth)  # of equals the first one
    others = [each for each in grid if each.variant.rounding != best.variant.rounding]
    candidate, unexplained = _with_mistakes(probe, best, others, answers)
    if not unexplained and not candidate.of_dtype and candidate.activation is None:
        _ask_large(probe, candidate)
    free = _free(probe, candidate, unexplained, answers)
    if free is not None:
        candidate, unexplained = free, {}
        probe.findings.add("statistic_dtype", "that of x", "every operation is rounded to the dtype of x")
        probe.findings.add("rounding", "input_dtype", "every operation is rounded to the dtype of x")
    else:
        least = [np.mean(scores[each.variant]) - np.mean(scores[best.variant]) for each in others if narrow]
        _report(
            probe, candidate, float(np.mean(scores[best.variant])) if narrow else 0.0, float(min(least, default=0.0))
        )
    if {*unexplained} == {*probe.accepts}:
        eps = f"eps {candidate.variant.eps}, {candidate.variant.eps_position}"
        nearest = "; ".join([eps, *(each.says for each in candidate.mistakes)])
        raise NotRms(f"no norm that is known predicts its y in any dtype; the nearest is {nearest}")
    for dtype, own in unexplained.items():
        _defect_of(probe, grid, dtype, own)
    shares = {f"{_pair(answer)}": 100 * candidate.score(probe, answer) for answer in answers}
    evidence = "; ".join(f"{pair} {share:.4g} %" for pair, share in shares.items())
    probe.findings.add("confirmed", not unexplained, f"so much of random y is within the bounds: {evidence}")
    return candidate, not unexplained


def _ask_large(probe: Probe, candidate: Candidate) -> None:
    """Rows of every size up to those whose squares overflow: what cuts them off."""
    for dtype in ("float32", "bfloat16", "float16"):
        if dtype not in probe.accepts:
            continue
        answer = probe.answer(16, dtype, sizes=(1.5, _LARGE[dtype]))

        def wrong_rows(candidate: Candidate, answer: Answer = answer) -> Array:
            return probe.matrix(candidate.alike(probe, answer)).mean(1) < HOLDS_FREELY

        wrong = wrong_rows(candidate)
        sizes = np.max(np.abs(probe.matrix(answer.arrays["x"])), axis=1)
        if not wrong.any() or np.mean(wrong[sizes >= np.min(sizes[wrong])]) < _MOST:
            continue  # what is wrong elsewhere, the judge finds
        cut = (each.says for each in mistakes.of_range() if not wrong_rows(candidate.but(each)).any())
        other = f"for {dtype} x, y of rows with x beyond {np.min(sizes[wrong]):.0e} is another one"
        probe.findings.defect(next(cut, other))
        return


def _pair(answer: Answer) -> str:
    """The dtypes of x and of the gain in short."""
    return "/".join(dtypes.short(name) for name in dict.fromkeys((answer.dtype, answer.gain or answer.dtype)))


def _grid(known: Candidate, rule: str, *, has_gain: bool) -> Iterator[Candidate]:
    """Every choice of where is rounded, the most usual ones first."""
    for scale_dtype in ("own", "x") if has_gain else ("own",):
        for rounding in ("after_scale", "before_scale") if mistakes.GAIN_FIRST not in known.mistakes else _ONCE:
            yield known.of(rounding=rounding, result_dtype=rule, scale_dtype=scale_dtype)
        if rule == "promote":
            yield known.of(rounding="before_scale", result_dtype="promote_first", scale_dtype=scale_dtype)


def _with_result(probe: Probe, known: Candidate, answers: Sequence[Answer]) -> tuple[str | None, Candidate]:
    """The rule that gives the dtype of y in every pair; or the candidate with the one dtype that y always has."""
    results = {(answer.dtype, answer.gain): answer.y.dtype.name for answer in answers}
    listed = ", ".join(f"{_pair(answer)}: {dtypes.short(answer.y.dtype.name)}" for answer in answers[::2])

    def ruled(rule: str, x: str, gain: str | None) -> str:
        variant = Variant(name="identified", result_dtype=rule)  # type: ignore[arg-type]
        scale = None if gain is None else Spec((1,), gain)
        return resolve("identify", Spec((1,), x), scale, variant=variant).result_dtype

    fitting = [rule for rule in _RULES if all(ruled(rule, *pair) == y for pair, y in results.items())]
    if fitting:
        one = fitting[0] if len(fitting) == 1 else None
        probe.findings.add("result_dtype", one, listed if one else f"more than one rule gives it: {listed}")
        return fitting[0], known
    always = {*results.values()}
    if len(always) == 1 and len({x for x, _ in results}) > 1:
        (word,) = always
        probe.findings.add("result_dtype", f"always {word}", listed)
        if word != "float32" or {*dtypes.HALF} & {x for x, _ in results}:  # else it is a function of float32 alone
            probe.findings.defect(f"y is {word} whatever x is")
        return None, replace(known, result=word)
    probe.findings.add("result_dtype", "another rule", listed)
    probe.findings.defect(f"the dtype of y follows no known rule ({listed})")
    return None, replace(known, result=ANY)


def _with_mistakes(
    probe: Probe, best: Candidate, others: Sequence[Candidate], answers: Sequence[Answer]
) -> tuple[Candidate, dict[str, list[Answer]]]:
    """The candidate with the mistake that explains y of each dtype of x; and the answers that none explains."""
    explained: list[tuple[str, Mistake]] = []
    unexplained: dict[str, list[Answer]] = {}
    for dtype in probe.accepts:
        own = [answer for answer in answers if answer.dtype == dtype]
        if not own or best.holds(probe, own):
            continue
        bases = [best, *others] if dtype in dtypes.HALF else [best]
        trials = (
            (base, mistake) for base in bases for mistake in _tried(probe, base, dtype, own)
            if replace(base, of_dtype=((dtype, mistake),)).holds(probe, own)
        )  # fmt: skip
        if (trial := next(trials, None)) is None:
            unexplained[dtype] = own
        else:
            best = trial[0]
            explained.append((dtype, trial[1]))
    return replace(best, of_dtype=tuple(explained)), unexplained


def _tried(probe: Probe, base: Candidate, dtype: str, own: Sequence[Answer]) -> Iterator[Mistake]:
    """The mistakes that somebody makes for x of one dtype."""
    eps = base.variant.eps_for(dtype)
    yield from mistakes.of_statistic(dtype)
    yield from mistakes.of_eps(dtype, eps, _eps_of(probe, base, own))
    yield from mistakes.of_x(dtype)
    for mistake in (*mistakes.of_product(dtype), *mistakes.of_range()):
        if base.activation is not None or "gate" not in mistake.says:
            yield mistake


def _eps_of(probe: Probe, base: Candidate, own: Sequence[Answer]) -> float | None:
    """The eps that rows of one dtype show, None where they show none."""
    values: list[float] = []
    for answer in own:
        s = Steps(base.data(probe, answer.arrays), base.changes(answer.dtype))
        with np.errstate(all="ignore"):
            basis = s.h * (s.offset + s.gain) * s.on_y
            y = answer.y.astype(np.float64) - s.bias * s.on_y
            rho = s.inner(basis * basis) / s.inner(basis * y)
            value, part = eps_of(s.position, s.q, rho, s.size)
            values += value[np.isfinite(value) & (part > 0.3) & (rho > 0)].tolist()
    if len(values) < 4:
        return 0.0 if base.variant.eps_for(own[0].dtype) else None
    middle = float(np.median(values))
    machine = dtypes.epsilon(own[0].dtype)
    return machine if abs(middle / machine - 1) < 0.02 else nice(middle, 0.02, 0.0)


def _free(
    probe: Probe, candidate: Candidate, unexplained: Mapping[str, list[Answer]], answers: Sequence[Answer]
) -> Candidate | None:
    """The candidate that rounds every operation to the dtype of x, where that is what 16-bit y shows.

    Nothing is known of the order of its operations, so its bounds are wide. It must be near the formula nevertheless:
    the 1 / rho of most rows errs by few roundings.
    """
    halves = [dtype for dtype in probe.accepts if dtype in dtypes.HALF]
    of_rho = {
        dtype for dtype, mistake in candidate.of_dtype if mistake.says == f"for {dtype} x, rho is rounded to {dtype}"
    }
    if not halves or {*unexplained} & {*halves} | of_rho != {*halves} or {*unexplained} - {*halves}:
        return None
    free = replace(candidate, of_dtype=()).of(rounding="input_dtype", scale_dtype="own")
    own = [answer for answer in answers if answer.dtype in halves]
    for answer in own:
        size = np.sqrt(np.mean(probe.matrix(answer.arrays["x"]) ** 2, axis=1))
        ordinary = probe.of_rows((size > _ORDINARY[0]) & (size < _ORDINARY[1]), answer.y)
        where = np.broadcast_to(ordinary, answer.y.shape)
        if not where.any():
            continue
        share = free.score(probe, answer, where=where)
        errors = _error(probe, free, answer, where)
        if share < HOLDS_FREELY or errors > _FREE * dtypes.unit_roundoff(answer.dtype):
            return None
    return free


def _error(probe: Probe, candidate: Candidate, answer: Answer, where: Array) -> float:
    """By how much 1 / rho errs in the middle of the rows."""
    data, changes = candidate.data(probe, answer.arrays), candidate.changes(answer.dtype)
    with np.errstate(all="ignore"):
        want = Steps(data, changes).y
        ratio = probe.matrix(answer.y.astype(np.float64) / want - 1)
    known = np.isfinite(ratio) & probe.matrix(where).astype(bool)
    of_rows = [float(np.median(row[use])) for row, use in zip(ratio, known, strict=True) if use.any()]
    return float(np.median(np.abs(of_rows))) if of_rows else 0.0


def _report(probe: Probe, candidate: Candidate, share: float, other: float) -> None:
    """What is known of the rounding, of ``share`` of 16-bit y, beside which another rounding has ``other`` less."""
    findings = probe.findings
    if not any(dtype in dtypes.HALF for dtype in probe.accepts):
        findings.add("statistic_dtype", None, "it takes no 16-bit x")
        findings.add("rounding", None, "it takes no 16-bit x")
        return
    words = [mistake.says.removeprefix(f"for {dtype} x, ").partition(",")[0] for dtype, mistake in candidate.of_dtype]
    narrow = [word for word in words if "rho" in word or "square" in word]
    exact = "the exact 1 / rho explains every element of 16-bit y"
    evidence = "the rounding that explains 16-bit y" if narrow else exact
    findings.add("statistic_dtype", narrow[-1] if narrow else "float32 or wider", evidence)
    if abs(other) > _TELLS:
        shares = f"{100 * share:.5g} % of 16-bit y has the bits of this rounding, {100 * (share + other):.3g} %"
        evidence = f"{shares} those of the other one"
        findings.add("rounding", candidate.variant.rounding, evidence)
    else:
        findings.add("rounding", None, "no step after x / rho can be rounded separately")
    if candidate.variant.result_dtype == "promote_first":
        findings.add("result_dtype", "promote_first", "x / rho is rounded to the dtype of y, too")
    if candidate.variant.scale_dtype == "x":
        findings.add("scale_dtype", "x", "16-bit y has the bits of a gain that is cast to the dtype of x first")
    findings.defect(*_together(probe.accepts, candidate))


def _together(accepts: Sequence[str], candidate: Candidate) -> list[str]:
    """The sentences on the mistakes: one where every dtype of x has the same."""
    tails = {mistake.says.removeprefix(f"for {dtype} x, ") for dtype, mistake in candidate.of_dtype}
    return (
        [*tails]
        if len(tails) == 1 < len(accepts) == len(candidate.of_dtype)
        else [m.says for _, m in candidate.of_dtype]
    )


def _defect_of(probe: Probe, grid: Sequence[Candidate], dtype: str, own: Sequence[Answer]) -> None:
    """The sentence on y that nothing explains."""
    if dtype not in dtypes.HALF:
        probe.findings.defect(f"for {dtype} x, y is beyond the bounds of what the formula predicts")
        return
    most = max(min(each.score(probe, answer) for answer in own) for each in grid)
    probe.findings.defect(f"for {dtype} x, y is rounded in an unknown way: {100 * most:.3g} % of it can be predicted")
