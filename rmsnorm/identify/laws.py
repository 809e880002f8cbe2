"""How eps, the divisor and a factor of y depend on the width: each way to write them is a candidate at another one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Final, NamedTuple

from rmsnorm.identify import mistakes
from rmsnorm.identify.asking import Answer, Probe
from rmsnorm.identify.candidates import Candidate
from rmsnorm.identify.fit import Fit, digits, nice
from rmsnorm.identify.mistakes import Mistake
from rmsnorm.targets.target import TargetError

_FORMULAS: Final = {
    "inside": "sqrt(q + eps)", "outside": "sqrt(q) + eps", "clamp": "max(sqrt(q), eps / sqrt(k))",
}  # fmt: skip
_FEW: Final = 2  # digits of a number that somebody wrote
_MOST: Final = 0.97  # of y
_ALIKE: Final = 1e-4  # relative, of numbers that were measured in float32


class Law(NamedTuple):
    """One way to write the divisor, ``size``, and a factor of y, in which eps is ``eps``: what it is at every width."""

    mistake: Mistake | None
    eps: float
    size: float


def at_other_widths(probe: Probe, known: Candidate, k: int, fit: Fit, *, inexact: bool) -> Candidate:
    """The candidate with eps, a divisor and a factor that hold at another width, too, where there is one."""
    findings = probe.findings
    ways = [
        (law, eps, words)
        for of_eps, law in product((False, True), _laws(fit, k, probe.n))
        for eps, words in _eps(fit.position, law, k, depends=of_eps)
    ]
    width, other, answers = _other(probe, known, fit)
    chosen = ways[0]
    if other is None:
        same = [(eps, words) for law, eps, words in ways if words and law == chosen[0]]
        others = [words.says for eps, words in same if _is_nicer(fit, chosen[1], eps)]
        also = f"; it may also be that {others[0]}" if others else ""
        why = "the groups have this size at every width" if probe.layout.group else "no other width could be tried"
        findings.add("widths", str(probe.n), f"{why}: a number that depends on n cannot be told from a constant{also}")
    else:
        holding = [way for way in ways if inexact or _is_law(_candidate(known, fit, way), other, answers)]
        findings.add("widths", f"{probe.n} and {width}", "elements in a row, of which the same is true")
        if not holding:
            findings.defect(
                f"the denominator depends on the width in no known way: with {probe.n} and {width} elements in a row "
                "it is another one"
            )
            law, eps, _ = min(ways, key=lambda way: digits(way[1]))
            return _said(probe, _candidate(known, fit, (law, eps, None)), [])
        chosen = holding[0]
    candidate = _candidate(known, fit, chosen)
    return _said(probe, candidate, [mistake.says for mistake in candidate.mistakes[len(known.mistakes) :]])


def _is_law(candidate: Candidate, other: Probe, answers: list[Answer]) -> bool:
    """Whether it holds of most of y: outliers may be cut off, which no law says."""
    return all(candidate.score(other, answer, exact=False) >= _MOST for answer in answers)


def _is_nicer(fit: Fit, constant: float, other: float) -> bool:
    """Whether somebody would rather have written the other eps."""
    if not constant:
        return False
    most = _FEW if digits(constant) > _FEW else digits(constant) if fit.position == "clamp" else 0
    return digits(other) <= most


def _laws(fit: Fit, k: int, n: int) -> Iterator[Law]:
    """The ways to write the divisor, the most usual one first: any number may be one, or the square of a factor."""
    ratio = fit.divisor * fit.factor**2

    def of_size(mistake: Mistake | None, size: float) -> Law:
        return Law(mistake, _eps_of(fit, size, 1.0), size)

    def of_factor(words: str, value: Any) -> Law:
        times = math.sqrt(ratio / k)
        large = "too large" if times > 1 else "what it must be"
        return Law(mistakes.factor(f"{times:.6g}{words} times {large}", value), _eps_of(fit, k, times), k)

    constant = mistakes.divisor(f"{ratio:.7g} at every width, not by {'n' if k == n else 'k'}", lambda s: ratio)
    if abs(ratio / k - 1) < _ALIKE:
        yield of_size(None, k)
        yield of_size(constant, k)
        return
    name = "n" if k == n else "k"
    for size, mistake in (
        (1, mistakes.OF_SUM),
        (k - 1, mistakes.divisor(f"{name} - 1 = {k - 1}", lambda s: max(s.k - 1, 1))),
        (k + 1, mistakes.divisor(f"{name} + 1 = {k + 1}", lambda s: s.k + 1)),
        (n, mistakes.divisor(f"all {n} elements, of which {k} are summed", lambda s: s.n)),
    ):
        if abs(ratio / max(size, 1) - 1) < _ALIKE:
            yield of_size(mistake, size)
    times = nice(math.sqrt(ratio / k), _ALIKE)
    yield of_factor("", lambda s: times)
    yield of_factor(" (sqrt(n))", lambda s: times / math.sqrt(k) * math.sqrt(s.k))
    yield of_factor(" (1 / sqrt(n))", lambda s: times * math.sqrt(k) / math.sqrt(s.k))
    yield of_size(constant, ratio)


def _eps_of(fit: Fit, size: float, factor: float) -> float:
    """eps of the fit where the divisor and the factor are these."""
    times = factor / fit.factor
    if fit.position == "outside":
        return fit.eps * times
    return fit.eps * (times * math.sqrt(size / fit.divisor) if fit.position == "clamp" else times**2)


def _eps(position: str, law: Law, k: int, *, depends: bool) -> Iterator[tuple[float, Mistake | None]]:
    """eps as a number; or what it is made of, with the mistake."""
    eps, within = law.eps, 2 * _ALIKE
    if not depends:
        yield nice(eps, within, 0.0), None
    elif eps and position == "inside":
        of_sum = nice(eps * k, within, 0.0)
        words = f"eps is {of_sum:.6g} / n: it is added to the sum of squares, not to their mean"
        yield of_sum, mistakes.eps_of(words, lambda s: of_sum / s.k)
    elif eps and position == "outside":
        of_norm = nice(eps * math.sqrt(k), within, 0.0)
        words = f"eps is {of_norm:.6g} / sqrt(n): it is added to the norm, not to the root of the mean square"
        yield of_norm, mistakes.eps_of(words, lambda s: of_norm / math.sqrt(s.k))
    elif eps and position == "clamp":
        floor = nice(eps / math.sqrt(law.size), within, 0.0)
        square = nice(floor**2, 4 * _ALIKE, 0.0)
        floor = math.sqrt(square) if digits(square) < digits(floor) else floor
        also = f" (q has {square:.6g})" if digits(square) <= digits(floor) else ""
        words = f"rho has the floor {floor:.6g}{also} at every width, not eps / sqrt(n)"
        yield floor, mistakes.eps_of(words, lambda s: floor * s.size**0.5)


_Way = tuple[Law, float, Mistake | None]


def _candidate(known: Candidate, fit: Fit, way: _Way) -> Candidate:
    law, eps, of_eps = way
    position = "inside" if fit.position == "of max" else fit.position
    candidate = known.of(eps=eps, eps_position=position)
    of_eps = mistakes.eps_of_max(eps) if fit.position == "of max" else of_eps
    return candidate.but(*(mistake for mistake in (law.mistake, of_eps) if mistake))


def _other(probe: Probe, known: Candidate, fit: Fit) -> tuple[int, Probe | None, list[Answer]]:
    """A probe of another width that can be had, and its y."""
    low = -16.0 if probe.wide != "float16" else -4.0
    spans, neutral = [(low, 1.0), (-1.5, 1.0)], {"scale": 1.0 if known.variant.scale_offset != -1 else 2.0, "bias": 0.0}
    if fit.eps:
        middle = math.log10(fit.eps) * (0.5 if fit.position == "inside" else 1.0)
        spans.append((max(low, middle - 1), middle + 1.5))
    for width, other in probe.other_widths((2, 3, 0.5)):
        try:
            with other.target.evaluating():
                answers = [other.answer(31 + i, probe.wide, sizes=span, fixed=neutral) for i, span in enumerate(spans)]
        except TargetError:
            continue
        return width, other, answers
    return probe.n, None, []


def _said(probe: Probe, candidate: Candidate, sentences: Sequence[str]) -> Candidate:
    """The candidate, after its new mistakes and the answers are in the record."""
    variant, findings = candidate.variant, probe.findings
    findings.defect(*sentences)
    rho = f"rho = {_FORMULAS[variant.eps_position]} with eps = {variant.eps:.4g} on rows of every size"
    evidence = "; ".join([*sentences, rho])
    findings.add("eps_position", variant.eps_position if variant.eps else None, evidence if variant.eps else "eps is 0")
    findings.add("eps", variant.eps, evidence)
    return candidate
