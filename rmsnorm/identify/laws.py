"""How eps, the divisor and a factor of y depend on the width: each way to write them is a candidate at another one."""

from __future__ import annotations

import math
from collections.abc import Iterator
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


class _Way(NamedTuple):
    """A divisor and a factor of y that somebody may have written, as a mistake or None, and the eps beside them."""

    mistake: Mistake | None
    eps: float
    of_eps: Mistake | None = None

    def candidate(self, known: Candidate, fit: Fit) -> Candidate:
        is_rescaled = fit.position == "of max"
        of_eps = mistakes.eps_of_max(self.eps) if is_rescaled else self.of_eps
        candidate = known.of(eps=self.eps, eps_position="inside" if is_rescaled else fit.position)
        return candidate.but(*(mistake for mistake in (self.mistake, of_eps) if mistake))


def at_other_widths(probe: Probe, known: Candidate, k: int, fit: Fit, *, inexact: bool) -> Candidate:
    """The candidate with eps, a divisor and a factor that hold at another width, too, where there is one."""
    findings, ways = probe.findings, list(_ways(fit, k, probe.n))
    width, other, answers = _other(probe, known, fit)
    holding, unknown = ways, ""
    if other is None:
        also = next((way.of_eps.says for way in ways if way.of_eps and _is_nicer(fit, ways[0].eps, way)), "")
        why = "the groups have this size at every width" if probe.layout.group else "no other width could be tried"
        also = f"; it may also be that {also}" if also else ""
        findings.add("widths", str(probe.n), f"{why}: a number that depends on n cannot be told from a constant{also}")
    else:
        findings.add("widths", f"{probe.n} and {width}", "elements in a row, of which the same is true")
        if not inexact:  # outliers may be cut off, which no way says: most of y is enough
            tried = [(way, way.candidate(known, fit)) for way in ways]
            holding = [way for way, each in tried
                       if all(each.score(other, answer, exact=False) >= _MOST for answer in answers)]  # fmt: skip
        if not holding:
            unknown = (
                f"the denominator depends on the width in no known way: with {probe.n} and {width} elements in a row "
                "it is another one"
            )
            holding = [min((way for way in ways if not way.of_eps), key=lambda way: digits(way.eps))]
    candidate = holding[0].candidate(known, fit)
    sentences = [unknown] if unknown else [each.says for each in candidate.mistakes[len(known.mistakes) :]]
    findings.defect(*sentences)
    variant = candidate.variant
    rho = f"rho = {_FORMULAS[variant.eps_position]} with eps = {variant.eps:.4g} on rows of every size"
    evidence = "; ".join([*([] if unknown else sentences), rho])
    findings.add("eps_position", variant.eps_position if variant.eps else None, evidence if variant.eps else "eps is 0")
    findings.add("eps", variant.eps, evidence)
    return candidate


def _is_nicer(fit: Fit, constant: float, way: _Way) -> bool:
    """Whether somebody would rather have written this eps that depends on the width, where one width is known."""
    most = _FEW if digits(constant) > _FEW else digits(constant) if fit.position == "clamp" else 0
    return bool(constant) and digits(way.eps) <= most


def _ways(fit: Fit, k: int, n: int) -> Iterator[_Way]:
    """The most usual ways first: those with an eps that is a number, then those with one that depends on n."""
    divided = list(_divided(fit, k, n))
    yield from (_Way(mistake, nice(_eps_of(fit, size, times), 2 * _ALIKE, 0.0)) for mistake, size, times in divided)
    for mistake, size, times in divided:
        eps, says = _eps_of(fit, size, times), ""
        if not eps or fit.position == "of max":
            continue
        if fit.position == "inside":
            eps = nice(eps * k, 2 * _ALIKE, 0.0)
            says = f"eps is {eps:.6g} / n: it is added to the sum of squares, not to their mean"
            change = mistakes.eps_of(says, lambda s, eps=eps: eps / s.k)  # type: ignore[misc]
        elif fit.position == "outside":
            eps = nice(eps * math.sqrt(k), 2 * _ALIKE, 0.0)
            says = f"eps is {eps:.6g} / sqrt(n): it is added to the norm, not to the root of the mean square"
            change = mistakes.eps_of(says, lambda s, eps=eps: eps / math.sqrt(s.k))  # type: ignore[misc]
        else:
            eps = nice(eps / math.sqrt(size), 2 * _ALIKE, 0.0)
            square = nice(eps**2, 4 * _ALIKE, 0.0)
            eps = math.sqrt(square) if digits(square) < digits(eps) else eps
            also = f" (q has {square:.6g})" if digits(square) <= digits(eps) else ""
            says = f"rho has the floor {eps:.6g}{also} at every width, not eps / sqrt(n)"
            change = mistakes.eps_of(says, lambda s, eps=eps: eps * s.size**0.5)  # type: ignore[misc]
        yield _Way(mistake, eps, change)


def _divided(fit: Fit, k: int, n: int) -> Iterator[tuple[Mistake | None, float, float]]:
    """A divisor of the sum of squares and a factor of y that give what was seen, with the mistake."""
    ratio, name = fit.divisor * fit.factor**2, "n" if k == n else "k"
    constant = mistakes.divisor(f"{ratio:.7g} at every width, not by {name}", lambda s: ratio), ratio, 1.0
    if abs(ratio / k - 1) < _ALIKE:
        yield None, k, 1.0
        yield constant
        return
    for size, mistake in (
        (1, mistakes.OF_SUM),
        (k - 1, mistakes.divisor(f"{name} - 1 = {k - 1}", lambda s: max(s.k - 1, 1))),
        (n, mistakes.divisor(f"all {n} elements, of which {k} are summed", lambda s: s.n)),
    ):
        if abs(ratio / max(size, 1) - 1) < _ALIKE:
            yield mistake, size, 1.0
    times, root = nice(math.sqrt(ratio / k), _ALIKE), math.sqrt(k)
    large = "too large" if times > 1 else "what it must be"
    ways: dict[str, Any] = {
        "": lambda s: times,
        " (sqrt(n))": lambda s: times / root * math.sqrt(s.k),
        " (1 / sqrt(n))": lambda s: times * root / math.sqrt(s.k),
    }
    for words, value in ways.items():
        yield mistakes.factor(f"{times:.6g}{words} times {large}", value), k, math.sqrt(ratio / k)
    yield constant


def _eps_of(fit: Fit, size: float, factor: float) -> float:
    """eps of the fit where the divisor and the factor are these."""
    times = factor / fit.factor
    if fit.position == "outside":
        return fit.eps * times
    return fit.eps * (times * math.sqrt(size / fit.divisor) if fit.position == "clamp" else times**2)


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
