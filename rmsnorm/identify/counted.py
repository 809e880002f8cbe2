"""Which elements of a row enter the statistic: all of them, or the first k = ceil(n p) or floor(n p)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Final

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

_WIDTHS: Final = (43, 90, 100, 150, 157, 160)  # there every fraction, rounding and way to compute n p has another k
_FRACTIONS: Final = sorted(
    {Fraction(a, b) for b in (2, 3, 4, 8, 16, 32, 100) for a in range(1, b)}, key=lambda p: (p.denominator, p)
)
# Rounding, and whether n p is computed in floating point, where k is wrong if n p is: the ``int(d * p)`` of the
# authors' rmsnorm_torch.py, and of its copies, is 28 for d = 100 and p = 0.29.
_RULES: Final[Mapping[tuple[PartialRounding, bool], Callable[[int, Fraction], int]]] = {
    ("ceil", False): lambda n, p: math.ceil(n * p),
    ("floor", False): lambda n, p: math.floor(n * p),
    ("ceil", True): lambda n, p: math.ceil(n * float(p)),
    ("floor", True): lambda n, p: math.floor(n * float(p)),
}


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

    def measured_at(*widths: int) -> dict[int, int]:
        measured = {}
        for width in widths:
            with contextlib.suppress(NotRms, TargetError):  # for example the variance of one element
                resized = probe.resized(width) if not probe.layout.group else None
                if resized is not None:
                    measured[width] = find_counted(resized)
        return measured

    measured = {n: k} | (measured_at(2 * n) if k == n else {})
    if all(count == width for width, count in measured.items()):
        findings.add("partial", None, f"all {n} elements of a row change the others")
        return known
    measured |= measured_at(*_WIDTHS)
    listed = ", ".join(f"{count} of {width}" for width, count in sorted(measured.items()))
    p, rules = _fraction(measured)
    if not rules:
        mistake = _no_fraction(measured, listed)
        findings.defect(mistake.says)
        known = known.but(mistake)
    if k == n:
        findings.add("partial", None, f"at a width of {n} all elements change the others: {listed}")
        return known
    only = "; no other width could be tried: it may be another fraction, or a constant" if len(measured) == 1 else ""
    findings.add("partial", p or Fraction(k, n), f"the first elements that change the others: {listed}{only}")
    rounding: PartialRounding = "ceil"
    if rules:
        rounding, is_floating = rules[0]
        is_either = len(measured) == 1 or {*measured.values()} == {1} or rules[:2] == [*_RULES][:2]
        how = "ceil and floor give the k that was seen" if is_either else f"k = {rounding}(n p) at every width"
        findings.add("partial_rounding", None if is_either else rounding, f"{how}: {listed}")
        if is_floating:
            findings.defect(f"k = {rounding}(n p) is computed in floating point: {listed}")
    fraction = known.of(partial=p or Fraction(k, n), partial_rounding=rounding)
    return fraction if fraction.variant.counted(n) == k else fraction.of(partial=Fraction(k, n))


def _fraction(measured: Mapping[int, int]) -> tuple[Fraction | None, list[tuple[PartialRounding, bool]]]:
    """The simplest fraction that gives every k that was measured, and by which rules; none where no fraction does."""
    for p in _FRACTIONS:
        rules = [rule for rule, of in _RULES.items() if all(max(of(n, p), 1) == k for n, k in measured.items())]
        if rules:
            return p, rules
    return None, []


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
