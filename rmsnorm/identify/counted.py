"""Which elements of a row enter the statistic: all of them, or the first k = ceil(n p) or floor(n p)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Final, NamedTuple

import numpy as np

from rmsnorm.identify.asking import Probe
from rmsnorm.identify.candidates import Candidate
from rmsnorm.identify.findings import NotRms
from rmsnorm.identify.groups import responding
from rmsnorm.identify.mistakes import Mistake
from rmsnorm.parity.equations import Change
from rmsnorm.specification.variants import PartialRounding
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError

# beside those that are known: at these every fraction of _SIMPLE, rounding and way to compute n p gives another k
_WIDTHS: Final = (43, 90, 100, 150, 157, 160)
_WIDER: Final = (1029, 4001)  # where one element counts at all of these
_SIMPLE: Final = sorted(
    {Fraction(a, b) for b in (2, 3, 4, 8, 16, 32, 100) for a in range(1, b)}, key=lambda p: (p.denominator, p)
)
_EVERY: Final = tuple(
    dict.fromkeys([*_SIMPLE, *(Fraction(i, 1000) for i in range(1, 1000)), *(Fraction(a, b) for b in range(2, 65)
    for a in range(1, b))])
)  # fmt: skip
# rounding, and whether n p is computed in floating point
_RULES: Final[Mapping[tuple[PartialRounding, bool], Callable[[int, Fraction], int]]] = {
    ("ceil", False): lambda n, p: math.ceil(n * p),
    ("floor", False): lambda n, p: math.floor(n * p),
    ("ceil", True): lambda n, p: math.ceil(n * float(p)),
    ("floor", True): lambda n, p: math.floor(n * float(p)),
}


class Partial(NamedTuple):
    """k = ceil(n p) or floor(n p), at least 1.

    Attributes:
        p: the simplest fraction that gives every k that was measured, None where none does.
        rounding: None where both give the same.
        floating: n p was computed in floating point, and k is wrong where n p is. The ``int(d * p)`` of the authors'
            rmsnorm_torch.py, and of its copies, is 28 for d = 100 and p = 0.29.
        measured: k at the widths that were asked for.
    """

    p: Fraction | None
    rounding: PartialRounding | None
    floating: bool
    measured: Mapping[int, int]


def find_counted(probe: Probe) -> int:
    """How many elements of a row enter the statistic: all of them, or the first ones.

    Raises:
        NotRms: they are not the first ones.
    """
    n = probe.n
    low, high = 0, n - 1
    while n > 1:
        which = np.unique(np.linspace(low, high, 66).astype(int))
        inside: Array = np.asarray(responding(probe, which).any(axis=1))
        borders = np.flatnonzero(inside[1:] != inside[:-1])
        if inside.all():
            break
        if len(borders) != 1 or not inside[0]:
            raise NotRms("the elements that enter the statistic are not the first ones of a row")
        low, high = int(which[borders[0]]), int(which[borders[0] + 1])
        if high == low + 1:
            return high
    return n


def with_fraction(probe: Probe, known: Candidate, k: int) -> Candidate:
    """The candidate with the fraction of a row that enters the statistic, of which k count at the probe's width."""
    findings, n = probe.findings, probe.n

    def measure(width: int) -> int | None:
        try:
            resized = probe.resized(width) if not probe.layout.group else None
            return None if resized is None else find_counted(resized)
        except (NotRms, TargetError):  # for example the variance of one element
            return None

    wider = {width: counts for width in (2 * n,) if (counts := measure(width))} if k == n else {}
    if all(counts == width for width, counts in wider.items()) and k == n:
        findings.add("partial", None, f"all {n} elements of a row change the others")
        return known
    p, rounding, floating, measured = fit_partial({n: k} | wider, measure)
    listed = ", ".join(f"{entry} of {width}" for width, entry in sorted(measured.items()))
    if p is None:
        mistake = _no_fraction(measured, listed)
        findings.defect(mistake.says)
        known = known.but(mistake)
    if k == n:
        findings.add("partial", None, f"at a width of {n} all elements change the others: {listed}")
        return known
    only = "; no other width could be tried: it may be another fraction, or a constant" if len(measured) == 1 else ""
    findings.add("partial", p or Fraction(k, n), f"the first elements that change the others: {listed}{only}")
    if p is not None:
        both = "ceil and floor give the k that was seen"
        either = both if rounding is None else f"k = {rounding}(n p) at every width"
        findings.add("partial_rounding", rounding, f"{either}: {listed}")
    if floating:
        findings.defect(f"k = {rounding}(n p) is computed in floating point: {listed}")
    fraction = known.of(partial=p or Fraction(k, n), partial_rounding=rounding or "ceil")
    return fraction if fraction.variant.counted(n) == k else fraction.of(partial=Fraction(k, n))


def _no_fraction(measured: Mapping[int, int], listed: str) -> Mistake:
    """Elements that are no fraction of a row."""
    most = max(measured.values())
    for block in (2**power for power in range(10, 1, -1)):
        if all(k == (n // block * block or n) for n, k in measured.items()) and most != block:
            says = f"only whole blocks of {block} elements are summed, and the rest of a row is lost: {listed}"
            return Mistake(says, {"k": _whole_blocks_of(block)})
    if all(k == min(most, n) for n, k in measured.items()):
        says = f"the statistic has {most} elements at every width, whatever n is"
        return Mistake(says, {"k": lambda s, k: min(most, s.n)})
    says = f"the elements that enter the statistic are no fraction of a row: {listed}"
    return Mistake(says, {"k": lambda s, k: measured.get(s.n, k)})


def _whole_blocks_of(size: int) -> Change:
    return lambda s, k: s.n // size * size or s.n


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
    asked = {n: known.get(n) or measure(n) for n in (*known, *_WIDTHS)}
    if set(asked.values()) <= {None, 1}:
        asked |= {n: measure(n) for n in _WIDER}
    measured = {n: k for n, k in asked.items() if k is not None}
    for p in _EVERY:
        true = [rule for rule, count in _RULES.items() if all(max(count(n, p), 1) == k for n, k in measured.items())]
        if true:
            either = len(measured) == 1 or set(measured.values()) == {1} or true[:2] == [*_RULES][:2]
            return Partial(p, None if either else true[0][0], true[0][1], measured)
    return Partial(None, None, False, measured)
