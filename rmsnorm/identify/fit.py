"""The fit of eps: which statistic, divisor and place of eps predict 1 / rho of rows of every size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.accuracy.bounds import of_row
from rmsnorm.specification import dtypes
from rmsnorm.targets.bridges import Array

POSITIONS: Final = ("inside", "outside", "clamp", "of max")
_LEAST: Final = 4  # rows from which something is concluded
_EXACT: Final = 3e-7  # of 1 / rho in float32
_INEXACT: Final = 2.0**-8  # of 1 / rho in bfloat16, with two roundings
_POWERS: Final = {  # of the mean square, by which x is multiplied
    0.5: "multiplied by the root of its {}, not divided by it, as by x / rsqrt(q + eps)",
    -1.0: "divided by its {}, not by the root of it",
}


class Fit(NamedTuple):
    """One way to make 1 / rho of a row, and how far it is from what was seen.

    Attributes:
        error: the largest one, in units of what arithmetic may make of it: below 1 it holds.
        statistic: mean_square or variance.
        divisor: of the sum of squares.
        position: of eps; "of max" where eps is multiplied by the largest x^2.
        eps, factor: of rho and of y.
        centred: whether the mean is subtracted from x, too.
    """

    error: float
    statistic: str
    divisor: float
    position: str
    eps: float
    factor: float
    centred: bool

    @property
    def holds(self) -> bool:
        return self.error < 1


class Inverse(NamedTuple):
    """What y says of 1 / rho: by rows, with the rows that say something, and the share by which it may err."""

    h: Array
    values: Array
    room: Array
    is_known: Array


def inverse_of(x: Array, y: Array, dtype: str, f: Array | None = None, *, centred: bool) -> Inverse | None:
    """1 / rho of rows by least squares; None where y is not proportional to x, or to x less its mean.

    ``f``: what a gate multiplies y by.
    """
    h = x - x.mean(1, keepdims=True) if centred else x
    basis = h if f is None else h * f
    unit = np.max(np.abs(basis), axis=1, keepdims=True)
    known = np.isfinite(y).all(1) & (unit[:, 0] > 0)
    with np.errstate(all="ignore"):
        scaled, largest = basis / unit, np.max(np.abs(y), axis=1)
        slope = (scaled * y).sum(1) / (scaled * scaled).sum(1)
        off = np.where(largest > 0, np.max(np.abs(y - scaled * slope[:, None]), axis=1) / largest, 0.0)
        cancelled = np.max(np.abs(x), axis=1) / np.max(np.abs(h), axis=1) if centred else np.zeros(len(x))
    share = 1e-11 if dtype == "float64" else 4 * of_row(x.shape[1], dtype)
    room = share * (1 + cancelled) * (1 if f is None else 8)
    fits = known & (off <= np.maximum(room, 3e-5 if dtype == "float32" else 0.0))
    if not known.any() or fits[known].mean() < 0.9:
        return None
    with np.errstate(all="ignore"):
        return Inverse(h, slope / unit[:, 0], room, fits)


def fits(x: Array, y: Array, k: int, dtype: str, f: Array | None = None, *, inexact: bool = False) -> list[Fit]:
    """The fits that hold, the simplest first; where none does, the nearest one alone.

    Args:
        x, y: rows, without gain and bias.
        k: the elements of a row, from the first one, that enter the statistic.
        dtype: whose arithmetic is allowed for.
        f: what a gate multiplies y by.
        inexact: whether 1 / rho may be rounded to 16 bits.
    """
    tried: list[Fit] = []
    for centred in (False, True):
        seen = inverse_of(x, y, dtype, f, centred=centred)
        if seen is not None:
            tried += _of_inverse(seen, k, _INEXACT if inexact else _EXACT, centred=centred)
    holding = [fit for fit in tried if fit.holds]
    return holding or sorted(tried, key=lambda fit: fit.error)[:1]


def _of_inverse(seen: Inverse, k: int, least: float, *, centred: bool) -> Iterator[Fit]:
    counted = seen.h[:, :k]
    totals = {"mean_square": (counted**2).sum(1)}
    if not centred and k > 1:
        totals["variance"] = ((counted - counted.mean(1, keepdims=True)) ** 2).sum(1)
    for statistic, total in totals.items():
        use = seen.is_known & (seen.values > 0) & (total > 0) & (total < 1e300)
        if use.sum() < _LEAST:
            continue
        rho, slack = 1 / seen.values[use], np.maximum(seen.room[use], least)
        for size, factor in _divisors(total[use], rho, k, seen.h.shape[1]):
            for position in POSITIONS:
                top = np.max(np.abs(seen.h[use]), axis=1) if position == "of max" else np.ones(len(rho))
                q, own = total[use] / size / top**2, rho * factor / top
                eps = _eps(q, own, size, position, slack)
                want = rho_of(q, eps, size, position)
                allowed = 3 * slack + 1e-6 * (eps != float(f"{eps:.0e}"))
                error = float(np.max(np.abs(want / own - 1) / allowed))
                yield Fit(error, statistic, size, position, eps, factor, centred)


def _divisors(total: Array, rho: Array, k: int, n: int) -> Iterator[tuple[float, float]]:
    """The divisors of the sum of squares, with a factor of y, that rows of the largest sizes leave."""
    large = total > np.quantile(total, 0.8)
    ratio = float(np.median((total / rho**2)[large]))
    whole = round(ratio)
    yield from ((size, 1.0) for size in dict.fromkeys((k, 1, k - 1, k + 1, n)) if size >= 1)
    yield k, nice(math.sqrt(ratio / k), 1e-5)
    if whole > 1 and abs(ratio - whole) < 1e-4 * ratio:
        yield whole, 1.0


def rho_of(q: Array, eps: float, size: float, position: str) -> Array:
    """rho of a mean square."""
    if position == "outside":
        return np.asarray(np.sqrt(q) + eps)
    return np.asarray(np.maximum(np.sqrt(q), eps / math.sqrt(size)) if position == "clamp" else np.sqrt(q + eps))


def eps_of(position: str, q: Array, rho: Array, size: Any) -> tuple[Array, Array]:
    """eps by each row, and how large a part of its rho that is."""
    root = np.sqrt(q)
    if position == "outside":
        return rho - root, 1 - root / rho
    return (rho * np.sqrt(size), 1 - root / rho) if position == "clamp" else (rho**2 - q, 1 - q / rho**2)


def _eps(q: Array, rho: Array, size: float, position: str, slack: Array) -> float:
    """eps by the rows in which it is the largest part of rho."""
    value, part = eps_of(position, q, rho, size)
    shown = part > np.maximum(np.minimum(50 * slack, 0.5), 0.5 * np.max(part))
    if not shown.any():
        return 0.0
    middle = float(np.median(value[shown]))
    within = float(np.median((slack / np.maximum(part, 1e-9))[shown])) * 6 + 1e-7
    for machine in (dtypes.epsilon("float32"), dtypes.epsilon("float64")):
        if abs(middle / machine - 1) <= within:
            return machine
    return nice(middle, min(within, 0.02), 0.0)


def nice(value: float, within: float, least: float = 1e-3) -> float:
    """The number of fewest digits within a share of a value, of ``least`` if the value is smaller; else the value.

    >>> nice(9.999973e-07, 1e-5, 0.0), nice(0.99999, 1e-3), nice(1e-9, 1e-3)
    (1e-06, 1.0, 0.0)
    """
    if abs(value) < within * (least > 0):
        return 0.0
    for digits in range(3):
        near = float(f"{value:.{digits}e}")
        if abs(near - value) <= within * max(abs(value), least):
            return near
    return value


def digits(value: float) -> int:
    """How many digits a number is written with.

    >>> digits(1.5625e-08), digits(1e-06)
    (5, 1)
    """
    return len(f"{value:.12e}".split("e")[0].replace(".", "").rstrip("0"))


def what_else(x: Array, y: Array, dtype: str) -> str:
    """What rows of ordinary size are, where no fit holds."""
    seen = inverse_of(x, y, dtype, centred=False)
    if seen is None:
        if inverse_of(x, y, dtype, centred=True) is not None:
            return "the mean is subtracted in the numerator but not in the denominator"
        return "y is not the row divided by one number: its elements have different factors"
    inverse, h = np.abs(seen.values[seen.is_known]), seen.h[seen.is_known]
    if len(inverse) < _LEAST or not np.all(inverse > 0):
        return "y is 0 or not finite for ordinary rows"
    if _is_constant(inverse * np.max(np.abs(h), axis=1)):
        return "the denominator is the largest |x| of a row, not its root mean square"
    for word, q in (("mean square", np.mean(h * h, axis=1)), ("variance", np.var(h, axis=1))):
        for power, words in _POWERS.items():
            if _is_constant(inverse / q**power):
                return f"x is {words.format(word)}"
    return "the denominator is no function of the row's sum of squares and sum"


def _is_constant(values: Any) -> bool:
    return bool(np.all(np.isfinite(values)) and np.std(values) <= 0.01 * np.mean(values))
