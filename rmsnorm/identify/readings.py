"""How somebody would write the denominators that were measured: a divisor, a factor of y, and eps, at every width."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

import numpy as np

from rmsnorm.accuracy.bounds import FORMULA, within
from rmsnorm.identify.counted import Counted
from rmsnorm.specification import dtypes
from rmsnorm.specification.variants import EpsPosition


@dataclass(frozen=True)
class Denominator:
    """What was measured of rho at one width.

    Attributes:
        of: the elements of a row that enter the statistic.
        kind: mean_square or variance.
        size: what the sum of squares is divided by, if y has no factor.
        of_max: rho^2 grows by so many max|x|^2; 0 where it does not.
        noise: relative error of the measured 1 / rho.
        eps, position: for y without a factor; eps is 0 where x / rho does not change with the size of x.
        evidence: what was seen of eps, with ``{eps}`` for the eps that the denominator has.
    """

    of: Counted
    kind: Literal["mean_square", "variance"] = "mean_square"
    size: float = 0.0
    of_max: float = 0.0
    noise: float = 0.0
    eps: float = 0.0
    position: EpsPosition = "inside"
    evidence: str = ""

    @property
    def n(self) -> int:
        """Elements of a row."""
        return self.of.n

    @property
    def k(self) -> int:
        """How many of them enter the statistic."""
        return self.of.k


# A function of n and k, the elements of a row and those that are counted, by the way it is written.
FORMS: Final[Mapping[str, Callable[[Denominator], float]]] = {
    "1": lambda rho: 1,
    "n": lambda rho: rho.n,
    "k": lambda rho: rho.k,
    "k - 1": lambda rho: max(rho.k - 1, 1),
    "sqrt(k)": lambda rho: math.sqrt(rho.k),
    "1 / k": lambda rho: 1 / rho.k,
    "1 / sqrt(k)": lambda rho: 1 / math.sqrt(rho.k),
}
# what eps may be a multiple of, and what it then is
_EPS: Final[Mapping[EpsPosition, tuple[str, str]]] = {
    "inside": ("1 / k", ": it is added to the sum of squares, not to their mean"),
    "outside": ("1 / sqrt(k)", ": it is added to the norm, not to the root of the mean square"),
    "clamp": ("sqrt(k)", ""),
}
_FEW: Final = 2  # digits of a number that somebody wrote


class Term(NamedTuple):
    """A number times a form."""

    form: str
    times: float = 1.0

    def at(self, rho: Denominator) -> float:
        return self.times * FORMS[self.form](rho)

    def written(self, n: str) -> str:
        """As somebody would write it.

        >>> Term("1 / k", 1e-06).written("n"), Term("sqrt(k)").written("n")
        ('1e-06 / n', 'sqrt(n)')
        """
        form = self.form.replace("k", n)
        if form.startswith("1 / "):
            return f"{self.times:.6g}{form[1:]}"
        return form if self.times == 1 else f"{self.times:.6g} {form}"


K: Final = Term("k")
ONE: Final = Term("1")


@dataclass(frozen=True)
class Reading:
    """One way to write the denominator, and a factor of y, that is true at every width."""

    size: Term = K
    factor: Term = ONE
    eps: Term = ONE

    def unit(self, rho: Denominator) -> float:
        """eps of this reading, over eps as it was measured."""
        factor = self.factor.at(rho)
        if rho.position == "inside":
            return factor**2
        return factor * (math.sqrt(self.size.at(rho) / rho.k) if rho.position == "clamp" else 1.0)

    def sentences(self, first: Denominator, *, several: bool) -> dict[str, str]:
        """What no variant has, by the name of the finding."""
        n, said = "n" if first.k == first.n else "k", {}
        size, times = self.size.at(first), self.factor.at(first)
        if self.size != K:
            constant = f"{size:.7g} at every width, not by {n}" if several else f"{size:.7g}, not by {n} = {first.k}"
            words = {
                "1": "1: the norm, not the root of the mean" if size == 1 else constant,
                "n": f"all {first.n} elements, of which {first.k} are summed",
            }.get(self.size.form, f"{self.size.form.replace('k', n)} = {size:.7g}")
            said["divisor"] = f"the sum of squares is divided by {words}"
        if self.factor != ONE:
            form = "" if self.factor.form == "1" else f" ({self.factor.written(n)})"
            said["factor"] = f"y is {times:.6g}{form} times {'too large' if times > 1 else 'what it must be'}"
        if self.eps.form == "sqrt(k)":
            eps = self.eps.times
            square = nice(eps**2, 1e-8)
            also = f" (q has {square:.6g})" if _digits(square) <= _digits(eps) else ""
            said["eps"] = f"rho has the floor {eps:.6g}{also} at every width, not eps / sqrt({n})"
        elif self.eps.form != "1":
            said["eps"] = f"eps is {self.eps.written(n)}{_EPS[first.position][1]}"
        return said


def readings(measured: Sequence[Denominator]) -> list[Reading]:
    """The first reading that is true at all of these widths, if there is one.

    At one width every number is a constant. There the reading whose eps has few digits is taken, and a second one is
    the eps that may be meant: a multiple of something, with fewer digits.
    """
    noise, position = max(rho.noise for rho in measured), measured[0].position
    share, true = max(FORMULA, within(noise)), []
    usual, other = "1", _EPS[position][0]
    for form in (usual, other):
        for reading in _bases(measured, within(noise)):
            values = [rho.eps * reading.unit(rho) for rho in measured]
            eps = _fitted(form, values, measured, share) if any(values) else 0.0
            if eps is not None:
                true.append(replace(reading, eps=Term(form, nice(eps, noise))))
    if len(measured) > 1:
        return true[:1]
    first = min(true, key=lambda reading: (reading.eps.form, _digits(reading.eps.times) > _FEW))
    second = next(r for r in true if (r.size, r.factor, r.eps.form) == (first.size, first.factor, other))
    long = _digits(first.eps.times) > _FEW
    most = _FEW if long else _digits(first.eps.times) if position == "clamp" else 0
    if not first.eps.times or _digits(second.eps.times) > most:
        return [first]
    return [replace(first, eps=Term("1", second.eps.at(measured[0]))) if long else first, second]


def _bases(measured: Sequence[Denominator], tolerance: float) -> list[Reading]:
    """Every way to write the divisor, or a factor of y, that is true at these widths, the most usual ones first."""
    single, sizes = len(measured) == 1, [rho.size for rho in measured]
    for form in ("k", "k - 1", "n"):
        divisor = _fitted(form, sizes, measured, tolerance)
        if divisor is not None and abs(divisor - 1) <= tolerance:
            return [Reading(size=Term(form))]
    constant = _fitted("1", sizes, measured, tolerance)
    divisors = [] if constant is None else [Reading(size=Term("1", _written(constant, tolerance)))]
    if single and divisors[0].size == ONE:
        return divisors
    factors, readings = [math.sqrt(rho.size / rho.k) for rho in measured], []
    for form in ("1",) if single else ("1", "sqrt(k)", "1 / sqrt(k)"):
        times = _fitted(form, factors, measured, tolerance)
        if times is not None:
            readings.append(Reading(factor=Term(form, _written(times, tolerance))))
    return readings + divisors if single else divisors + readings


def _written(value: float, tolerance: float) -> float:
    """A number of few digits, where that is within the noise."""
    near = (float(round(value)), float(f"{value:.3g}"))
    return next((number for number in near if abs(number - value) <= tolerance * value), value)


def _fitted(form: str, values: Sequence[float], measured: Sequence[Denominator], tolerance: float) -> float | None:
    """What multiplies a form to give the values, None where nothing does."""
    ratios = np.array([value / FORMS[form](rho) for value, rho in zip(values, measured, strict=True)])
    middle = float(np.median(ratios))
    return middle if np.all(np.abs(ratios - middle) <= tolerance * abs(middle)) else None


def _digits(value: float) -> int:
    """How many digits a number is written with.

    >>> _digits(1.5625e-08), _digits(1e-06)
    (5, 1)
    """
    return len(f"{value:.12e}".split("e")[0].replace(".", "").rstrip("0"))


def nice(value: float, noise: float) -> float:
    """The number that was probably written: a machine epsilon, or the one of fewest digits within the noise.

    >>> nice(9.999973e-07, 1e-6), nice(1.1920930e-07, 1e-8)
    (1e-06, 1.1920928955078125e-07)
    """
    tolerance = within(noise, 1e-7, 5e-3)
    for name in dtypes.FLOATS:
        if abs(value / dtypes.epsilon(name) - 1) <= min(tolerance, 1e-3):
            return dtypes.epsilon(name)
    for digits in range(12):
        candidate = float(f"{value:.{digits}e}")
        if value == 0 or abs(candidate / value - 1) <= tolerance:
            return candidate
    return value
