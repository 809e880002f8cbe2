"""Which elements of a row enter the statistic: all of them, or the first k = ceil(n p) or floor(n p)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Final, NamedTuple

import numpy as np

from rmsnorm.identify.findings import NotRms
from rmsnorm.identify.groups import responding
from rmsnorm.identify.model import Model
from rmsnorm.identify.probe import Probe
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


class Counted(NamedTuple):
    """How many elements of a row of n enter the statistic: all of them, or the first k."""

    n: int
    k: int


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


def find_counted(probe: Probe) -> Counted:
    """The elements of a row that enter the statistic.

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
            return Counted(n, high)
    return Counted(n, n)


def with_fraction(probe: Probe, model: Model, own: Counted, known: Mapping[int, int]) -> Model:
    """The model with the fraction of a row that enters the statistic.

    Args:
        probe: of the target.
        model: as far as it is known.
        own: the elements that count at the width of the probe.
        known: k at that width and at others.
    """
    findings, n, k = probe.findings, own.n, own.k
    if all(entry == width for width, entry in known.items()):
        findings.add("partial", None, f"all {n} elements of a row change the others")
        return model

    def measure(width: int) -> int | None:
        try:
            resized = probe.resized(width) if not probe.layout.group else None
            return None if resized is None else find_counted(resized).k
        except (NotRms, TargetError):  # for example the variance of one element
            return None

    p, rounding, floating, measured = fit_partial(known, measure)
    listed = ", ".join(f"{entry} of {width}" for width, entry in sorted(measured.items()))
    if p is None:
        most = max(measured.values())
        findings.defect(
            f"the statistic has {most} elements at every width, whatever n is"
            if all(entry == min(most, width) for width, entry in measured.items())
            else f"the elements that enter the statistic are no fraction of a row: {listed}"
        )  # fmt: skip
    if k == n:
        findings.add("partial", None, f"at a width of {n} all elements change the others: {listed}")
        return model
    only = "; no other width could be tried: it may be another fraction, or a constant" if len(measured) == 1 else ""
    share = p or Fraction(k, n)
    findings.add("partial", share, f"the first elements that change the others: {listed}{only}")
    if p is not None and rounding is None:
        findings.add("partial_rounding", None, f"ceil and floor give the k that was seen: {listed}")
    elif p is not None:
        findings.add("partial_rounding", rounding, f"k = {rounding}(n p) at every width")
    if floating:
        findings.defect(f"k = {rounding}(n p) is computed in floating point: {listed}")
    variant = model.variant.replace(partial=p or Fraction(k, n), partial_rounding=rounding or "ceil")
    if variant.counted(n) != k:
        variant = variant.replace(partial=Fraction(k, n))
    return replace(model, variant=variant)


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
