"""Which fraction of a row enters the statistic, and how k is rounded, from k at several widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Final, Literal

import numpy as np

from rmsnorm.targets.bridges import Array

Rounding = Literal["ceil", "floor"]
WIDTHS: Final = range(8, 161)
_MOST: Final = 8  # widths that are asked for
_RULES: Final[tuple[tuple[Rounding, bool], ...]] = (("ceil", False), ("floor", False), ("ceil", True), ("floor", True))
_SIMPLE: Final = tuple(
    dict.fromkeys(
        [Fraction(i, 100) for i in range(1, 100)] + [Fraction(a, b) for b in (2, 3, 4, 8, 16, 32) for a in range(1, b)]
    )
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
        floating: n p was computed in floating point, and k is wrong where that is.
        seen: k at the widths that were asked for.
    """

    p: Fraction
    rounding: Rounding | None
    floating: bool
    seen: Mapping[int, int]


@cache
def _table(n: int) -> Array:
    """k at a width, for every rule and fraction."""
    numerators = n * np.array([p.numerator for p in _EVERY])
    denominators = np.array([p.denominator for p in _EVERY])
    product = n * np.array([float(p) for p in _EVERY])
    k = [-(-numerators // denominators), numerators // denominators, np.ceil(product), np.floor(product)]
    return np.clip(np.stack(k), 1, n).astype(np.int32)


def solve_partial(known: Mapping[int, int], measure: Callable[[int], int | None]) -> Partial:
    """Find the simplest p, and the rounding, that give k at every width.

    Args:
        known: k at the widths that were measured.
        measure: k at another width, None where it cannot be seen.

    Example:
        >>> found = solve_partial({64: 5}, lambda n: -(-7 * n // 100))
        >>> found.p, found.rounding, found.floating
        (Fraction(7, 100), 'ceil', False)
    """
    seen = dict(known)
    asked = set(seen)
    while len(asked) < _MOST:
        alive = _alive(seen)
        simple = alive.copy()
        simple[:, len(_SIMPLE) :] = False
        n = _telling(simple if simple.any() else alive, asked)
        if n is None:
            break
        asked.add(n)
        k = measure(n)
        if k is not None:
            seen[n] = k
    alive = _alive(seen)
    if not alive.any():
        n, k = max(seen.items())
        return Partial(Fraction(k, n), None, False, seen)
    best = int(np.flatnonzero(alive.any(axis=0))[0])
    rule = int(np.flatnonzero(alive[:, best])[0])
    either = len(seen) == len(known) or set(seen.values()) == {1} or bool(alive[0, best] and alive[1, best])
    return Partial(_EVERY[best], None if either else _RULES[rule][0], _RULES[rule][1], seen)


def _alive(seen: Mapping[int, int]) -> Array:
    alive = np.ones((len(_RULES), len(_EVERY)), bool)
    for n, k in seen.items():
        alive &= _table(n) == k
    return alive


def _telling(alive: Array, asked: set[int]) -> int | None:
    """The width at which those that are left disagree most, None where they agree at all of them."""
    best, most = None, 0.0
    for n in WIDTHS:
        if n not in asked:
            counts = np.bincount(_table(n)[alive])
            shares = counts[counts > 0] / counts.sum()
            entropy = float(-(shares * np.log(shares)).sum())
            if entropy > most + 1e-9:
                best, most = n, entropy
    return best
