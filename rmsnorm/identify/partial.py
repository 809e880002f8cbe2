"""Which fraction of a row enters the statistic, and how k is rounded, from k at several widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Final

import numpy as np

from rmsnorm.identify.findings import Learned, NotRms, not_observable
from rmsnorm.identify.model import Model
from rmsnorm.identify.session import Session
from rmsnorm.identify.statistic import Seen, find_counted
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError
from rmsnorm.variants import PartialRounding

WIDTHS: Final = range(8, 161)
_MOST: Final = 8  # widths that are measured beside those that are known
# rounding, and whether n p is computed in floating point
_RULES: Final[tuple[tuple[PartialRounding, bool], ...]] = (
    ("ceil", False),
    ("floor", False),
    ("ceil", True),
    ("floor", True),
)
_SIMPLE: Final = sorted(
    {Fraction(a, b) for b in (2, 3, 4, 8, 16, 32, 100) for a in range(1, b)}, key=lambda p: (p.denominator, p)
)
_EVERY: Final = tuple(
    dict.fromkeys([*_SIMPLE, *(Fraction(i, 1000) for i in range(1, 1000)), *(Fraction(a, b) for b in range(2, 65)
    for a in range(1, b))])
)  # fmt: skip


@dataclass(frozen=True)
class Partial:
    """k = ceil(n p) or floor(n p), at least 1.

    Attributes:
        p: the simplest fraction that gives every k that was seen.
        rounding: None where both give the same.
        floating: n p was computed in floating point, and k is wrong where n p is.
        seen: k at the widths that were measured.
        fits: whether any p gives them all.
    """

    p: Fraction
    rounding: PartialRounding | None
    floating: bool
    seen: Mapping[int, int]
    fits: bool = True


def solve_partial(session: Session, model: Model, looked: Sequence[Seen]) -> Model:
    """The model with the fraction of a row that enters the statistic, from what some widths show."""
    known = {entry.n: entry for entry in looked}
    counted = known[session.n]
    model = replace(model, last=counted.end == "last")
    if model.last:
        session.findings.defect(f"the statistic is that of the last {counted.k} elements, not of the first")
    if all(counted.k == n for n, counted in known.items()):
        session.findings.partial = Learned(None, f"all {session.n} elements of a row change the others")
        return model
    has_width = len(session.layout.axes) == 1 and not session.layout.group

    def measure(n: int) -> int | None:
        resized = session.resized(n) if has_width else None
        try:
            return None if resized is None else find_counted(resized).k
        except (NotRms, TargetError):  # for example the variance of one element
            return None

    partial = fit_partial({n: counted.k for n, counted in known.items()}, measure)
    listed = ", ".join(f"{k} of {n}" for n, k in sorted(partial.seen.items()))
    if not partial.fits:
        same = set(partial.seen.values()) == {counted.k}
        session.findings.defect(
            f"the statistic has {counted.k} elements at every width, whatever n is" if same
            else f"the elements that enter the statistic are no fraction of a row: {listed}"
        )  # fmt: skip
    if counted.k == session.n:
        session.findings.partial = Learned(None, f"at a width of {session.n} all elements change the others: {listed}")
        return model
    single = "; no other width could be tried: it may be another fraction, or a constant"
    only = single if len(partial.seen) == 1 else ""
    session.findings.partial = Learned(float(partial.p) if partial.fits else counted.k / session.n,
                 f"the {counted.end} elements that change the others: {listed}{only}")  # fmt: skip
    if partial.rounding is None and partial.fits:
        session.findings.partial_rounding = not_observable(f"ceil and floor give the k that was seen: {listed}")
    elif partial.fits:
        session.findings.partial_rounding = Learned(partial.rounding, f"k = {partial.rounding}(n p) at every width")
    if partial.floating:
        session.findings.defect(f"k = {partial.rounding}(n p) is computed in floating point: {listed}")
    variant = model.variant.replace(partial=partial.p, partial_rounding=partial.rounding or "ceil")
    if variant.counted(session.n) != counted.k:
        variant = variant.replace(partial=Fraction(counted.k, session.n))
    return replace(model, variant=variant)


@cache
def _table(n: int) -> Array:
    """k at a width, for every rule and fraction."""
    numerators = n * np.array([p.numerator for p in _EVERY])
    denominators = np.array([p.denominator for p in _EVERY])
    product = n * np.array([float(p) for p in _EVERY])
    k = [-(-numerators // denominators), numerators // denominators, np.ceil(product), np.floor(product)]
    return np.clip(np.stack(k), 1, n).astype(np.int32)


def fit_partial(known: Mapping[int, int], measure: Callable[[int], int | None]) -> Partial:
    """Find the simplest p, and the rounding, that give k at every width.

    Args:
        known: k at the widths that were measured.
        measure: k at another width, None where it is not observable.

    Example:
        >>> partial = fit_partial({64: 5}, lambda n: -(-7 * n // 100))
        >>> partial.p, partial.rounding, partial.floating
        (Fraction(7, 100), 'ceil', False)
    """
    seen = dict(known)
    asked = set(seen)
    while len(asked) - len(known) < _MOST:
        possible = _possible(seen)
        simple = possible.copy()
        simple[:, len(_SIMPLE) :] = False
        n = _most_telling(simple if simple.any() else possible, asked)
        if n is None:
            break
        asked.add(n)
        k = measure(n)
        if k is not None:
            seen[n] = k
    possible = _possible(seen)
    if not possible.any():
        n, k = max(seen.items())
        return Partial(Fraction(k, n), None, False, seen, fits=False)
    best = int(np.flatnonzero(possible.any(axis=0))[0])
    rule = int(np.flatnonzero(possible[:, best])[0])
    either = len(seen) == 1 or set(seen.values()) == {1} or bool(possible[0, best] and possible[1, best])
    return Partial(_EVERY[best], None if either else _RULES[rule][0], _RULES[rule][1], seen)


def _possible(seen: Mapping[int, int]) -> Array:
    """The rules and fractions that give every k."""
    possible = np.ones((len(_RULES), len(_EVERY)), bool)
    for n, k in seen.items():
        possible &= _table(n) == k
    return possible


def _most_telling(possible: Array, asked: set[int]) -> int | None:
    """The width at which the possible rules disagree most, None where they agree at all of them."""
    best, most = None, 0.0
    for n in WIDTHS:
        if n not in asked:
            counts = np.bincount(_table(n)[possible])
            shares = counts[counts > 0] / counts.sum()
            entropy = float(-(shares * np.log(shares)).sum())
            if entropy > most + 1e-9:
                best, most = n, entropy
    return best
