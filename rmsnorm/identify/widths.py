"""How the denominator depends on the width: what its sum is divided by, a factor of y, and eps, from several widths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rmsnorm.accuracy.bounds import FORMULA, within
from rmsnorm.identify.eps import look, nice, solve_eps
from rmsnorm.identify.findings import Learned, NotRms
from rmsnorm.identify.model import Model
from rmsnorm.identify.session import Session
from rmsnorm.identify.statistic import Seen
from rmsnorm.targets.target import TargetError

_MULTIPLES: Final = (2, 3, 4, 0.5, 0.25)  # of the first width: a target may take only some of them
_MORE: Final = 2  # of these are tried: two points fit any power of n, a third one does not fit a wrong one
_FEW: Final = 2  # digits of a number that somebody wrote


# functions of n and k, the elements of a row and those that are counted; k is n where all of them are
_FORMS: Final[Mapping[str, Callable[[Seen], float]]] = {
    "1": lambda seen: 1,
    "k": lambda seen: seen.k,
    "k - 1": lambda seen: max(seen.k - 1, 1),
    "n": lambda seen: seen.n,
    "k + 1": lambda seen: seen.k + 1,
    "k^2": lambda seen: seen.k**2,
    "sqrt(k)": lambda seen: math.sqrt(seen.k),
    "1 / k": lambda seen: 1 / seen.k,
    "1 / (k - 1)": lambda seen: 1 / max(seen.k - 1, 1),
    "1 / n": lambda seen: 1 / seen.n,
    "1 / (k + 1)": lambda seen: 1 / (seen.k + 1),
    "1 / sqrt(k)": lambda seen: 1 / math.sqrt(seen.k),
}
_SIZES: Final = ("k", "k - 1", "n", "k + 1", "k^2", "sqrt(k)")
_RARE: Final = ("k^2", "sqrt(k)")  # at one width a factor of y is as likely
_FACTORS: Final = ("1", "sqrt(k)", "1 / sqrt(k)", "k", "1 / k")
_EPS: Final = ("1", "1 / k", "1 / (k - 1)", "1 / n", "1 / (k + 1)", "1 / sqrt(k)", "sqrt(k)", "k")
_MEANS: Final = {
    ("inside", "1 / k"): ": it is added to the sum of squares, not to their mean",
    ("outside", "1 / sqrt(k)"): ": it is added to the norm, not to the root of the mean square",
}


@dataclass(frozen=True)
class _Reading:
    """One way to write the denominator, and a factor of y, that is true at every width.

    Attributes:
        size, factor: by the name of a form, and ``divisor`` and ``times`` that multiply it.
        eps: as it is written, for the form ``eps_form``.
    """

    size: str = "k"
    divisor: float = 1.0
    factor: str = "1"
    times: float = 1.0
    eps: float = 0.0
    eps_form: str = "1"

    @property
    def cost(self) -> int:
        """How many parts of it no variant has; an eps of many digits was written as something else."""
        parts = ((self.size, self.divisor) != ("k", 1.0)) + ((self.factor, self.times) != ("1", 1.0))
        return parts + (self.eps_form != "1") + 2 * (_digits(self.eps) > _FEW)

    def size_at(self, seen: Seen) -> float:
        return self.divisor * _FORMS[self.size](seen)

    def factor_at(self, seen: Seen) -> float:
        return self.times * _FORMS[self.factor](seen)

    def unit(self, seen: Seen) -> float:
        """eps of this reading, over eps as it was measured."""
        factor = self.factor_at(seen)
        if seen.position == "inside":
            return factor**2
        return factor * (math.sqrt(self.size_at(seen) / seen.k) if seen.position == "clamp" else 1.0)

    def sentences(self, first: Seen, *, single: bool) -> dict[str, str]:
        """What no variant has, by the name of the finding."""
        n, said = "n" if first.k == first.n else "k", {}
        size, times = self.size_at(first), self.factor_at(first)
        if (self.size, self.divisor) != ("k", 1.0):
            words = f"{self.size.replace('k', n)} = {size:.7g}"
            if self.size == "1":
                words = f"{size:.7g}, not by {n} = {first.k}" if single else f"{size:.7g} at every width, not by {n}"
            if self.size == "n":
                words = f"all {first.n} elements, of which {first.k} are summed"
            if size == 1:
                words = "1: the norm, not the root of the mean"
            said["divisor"] = f"the sum of squares is divided by {words}"
        if (self.factor, self.times) != ("1", 1.0):
            form = "" if self.factor == "1" else f" ({_product(self.times, self.factor, n)})"
            said["factor"] = f"y is {times:.6g}{form} times {'too large' if times > 1 else 'what it must be'}"
        if self.eps_form != "1":
            position = first.position
            said["eps"] = f"eps is {_product(self.eps, self.eps_form, n)}{_MEANS.get((position, self.eps_form), '')}"
            if (position, self.eps_form) == ("clamp", "sqrt(k)"):
                square = nice(self.eps**2, 1e-8)
                also = f" (q has {square:.6g})" if _digits(square) <= _digits(self.eps) else ""
                said["eps"] = f"rho has the floor {self.eps:.6g}{also} at every width, not eps / sqrt({n})"
        return said


def look_further(session: Session) -> list[Seen]:
    """The denominator at two other widths, or at fewer where it takes no more."""
    seen: list[Seen] = []
    for width, other in session.other_widths(_MULTIPLES):
        try:
            with other.target.evaluating():
                seen.append(look(other))
        except TargetError:
            continue
        except NotRms as reason:
            session.findings.defect(f"with {width} elements in a row it is not what it is with {session.n}: {reason}")
            return []
        if len(seen) == _MORE:
            break
    return seen


def _short(value: float) -> float:
    return int(value) if value == int(value) else value


def solve_denominator(session: Session, model: Model, first: Seen, others: Sequence[Seen]) -> Model:
    """The model with the simplest reading that is true at every width, and eps in each dtype."""
    seen = [first, *others]
    kinds = {(entry.kind, entry.position) for entry in seen if entry.eps}
    if len(kinds) > 1 or len({entry.end for entry in seen} - {"all"}) > 1:
        session.findings.defect(
            f"with {_listed([entry.n for entry in seen])} elements in a row it computes different norms"
        )
        seen = [first]
    fits = _readings(seen) if len(seen) > 1 else []
    single = not fits or len({entry.n for entry in seen}) == 1
    readings = _readings([first]) if single else fits
    chosen = readings[0]
    said = chosen.sentences(first, single=single)
    if single:  # eps is a number there; what somebody wrote is another question
        said.pop("eps", None)
    if "divisor" in said:
        session.findings.divisor = Learned(_short(chosen.size_at(first)), said["divisor"])
    if "factor" in said:
        session.findings.factor = Learned(_short(chosen.factor_at(first)), said["factor"])
    unknown = [] if fits or len(seen) == 1 else [_unknown(seen)]
    for sentence in unknown or said.values():
        session.findings.defect(sentence)
    if single and not unknown:
        session.findings.widths = Learned(str(first.n), _untried(session, seen, readings))
    else:
        solved = "the denominator below is that of the first" if unknown else "at which the denominator was solved"
        session.findings.widths = Learned(_listed([entry.n for entry in seen]), f"elements in a row, {solved}")
    scale = _FORMS[chosen.eps_form](first)
    words = said.get("eps", "")
    if single:  # the eps of that width is the whole of it
        chosen, scale = replace(chosen, eps=chosen.eps * scale, eps_form="1"), 1.0
    size = None if (chosen.size, chosen.divisor) == ("k", 1.0) else chosen.size_at(first)
    model = replace(model, size=size, factor=chosen.factor_at(first), eps_scale=scale)
    return solve_eps(session, model, first, chosen.eps, chosen.unit(first) / scale, words)


def _readings(seen: Sequence[Seen]) -> list[_Reading]:
    """The readings that are true at all of these widths, those with the fewest other parts first.

    At several widths eps has the first form that is true. At one every form is: those with few digits may be meant.
    """
    noise, clamp = max(entry.noise for entry in seen), seen[0].position == "clamp"
    forms = [form for form in _EPS if "n" not in form or any(entry.k != entry.n for entry in seen)]
    readings: list[_Reading] = []
    for reading in _bases(seen, within(noise)):
        values = [entry.eps * reading.unit(entry) for entry in seen]
        share = max(FORMULA, within(noise))
        every = {form: _fitted(form, values, seen, share) if any(values) else 0.0 for form in forms}
        true = [replace(reading, eps=nice(eps, noise), eps_form=form) for form, eps in every.items() if eps is not None]
        readings += true[:1]
        if true and len(seen) == 1:
            few, allowed = min(_FEW, _digits(true[0].eps) - (not clamp)), ("sqrt(k)",) if clamp else forms
            readings += [other for other in true[1:] if _digits(other.eps) <= few and other.eps_form in allowed]
    return sorted(readings, key=lambda reading: reading.cost)


def _bases(seen: Sequence[Seen], tolerance: float) -> list[_Reading]:
    """Every way to write the divisor, or a factor of y, that is true at these widths, the most usual ones first.

    At one width every number is a constant: a divisor that has no form comes last there.
    """
    single = len(seen) == 1
    sizes = [entry.size for entry in seen]
    factors = [math.sqrt(entry.size / entry.k) for entry in seen]
    forms = {form: _fitted(form, sizes, seen, tolerance) for form in _SIZES}
    known = [form for form, divisor in forms.items() if divisor is not None and abs(divisor - 1) <= tolerance]
    if all(entry.k == entry.n for entry in seen) and "n" in known:
        known.remove("n")
    readings = [_Reading(size=form) for form in known if form not in _RARE]
    constant = _fitted("1", sizes, seen, tolerance)
    divisor = 0.0 if constant is None else _written(constant, tolerance)
    if divisor == 1 or (divisor and not single):
        readings.append(_Reading(size="1", divisor=divisor))
    for form in _FACTORS[: 1 if single else None]:
        times = _fitted(form, factors, seen, tolerance)
        if times is not None and "k" not in known:
            readings.append(_Reading(factor=form, times=_written(times, tolerance)))
    readings += [_Reading(size=form) for form in known if form in _RARE]
    if single and not known and divisor != 1:
        readings.append(_Reading(size="1", divisor=divisor))
    return readings


def _written(value: float, tolerance: float) -> float:
    """A number of few digits, where that is within the noise."""
    short = float(f"{value:.3g}")
    whole = float(round(value))
    return next((near for near in (whole, short) if abs(near - value) <= tolerance * value), value)


def _fitted(form: str, values: Sequence[float], seen: Sequence[Seen], tolerance: float) -> float | None:
    """What multiplies a form to give the values, None where nothing does."""
    ratios = np.array([value / _FORMS[form](entry) for value, entry in zip(values, seen, strict=True)])
    middle = float(np.median(ratios))
    return middle if np.all(np.abs(ratios - middle) <= tolerance * abs(middle)) else None


def _unknown(seen: Sequence[Seen]) -> str:
    sizes = _listed([f"{entry.size:.4g}" for entry in seen])
    values = _listed([f"{entry.eps:.4g}" for entry in seen])
    return (
        f"the denominator depends on the width in no known way: with {_listed([entry.n for entry in seen])} elements "
        f"in a row the sum of squares is divided by {sizes}, and eps is {values}"
    )


def _untried(session: Session, seen: Sequence[Seen], readings: Sequence[_Reading]) -> str:
    """Why one width alone was tried, and what else its numbers may mean."""
    first, chosen = seen[0], readings[0]
    group = session.layout.group and len(seen) > 1
    why = "the groups have this size at every width" if group else "no other width could be tried"
    others = [
        " and ".join([*reading.sentences(first, single=True).values(), *_own_eps(reading, chosen)])
        for reading in readings
        if reading.eps_form != "1" or replace(reading, eps=chosen.eps) != replace(chosen, eps_form="1")
        if reading.cost <= chosen.cost or (first.position == "clamp" and reading.cost == chosen.cost + 1)
    ]
    more = f"; it may also be that {', or '.join(others)}" if others else ""
    return f"{why}: a number that depends on n cannot be told from a constant{more}"


def _own_eps(reading: _Reading, chosen: _Reading) -> list[str]:
    """Words on an eps that is another number than that of the chosen reading, and no form."""
    return [f"eps is {reading.eps:.6g}"] if reading.eps_form == "1" and reading.eps != chosen.eps else []


def _product(value: float, form: str, n: str) -> str:
    """A number times a form, as somebody would write it.

    >>> _product(1e-06, "1 / (k - 1)", "n"), _product(1.0, "sqrt(k)", "n")
    ('1e-06 / (n - 1)', 'sqrt(n)')
    """
    form = form.replace("k", n)
    if form.startswith("1 / "):
        return f"{value:.6g}{form[1:]}"
    return form if value == 1 else f"{value:.6g} {form}"


def _digits(value: float) -> int:
    """How many digits a number is written with.

    >>> _digits(1.5625e-08), _digits(1e-06)
    (5, 1)
    """
    return len(f"{value:.12e}".split("e")[0].replace(".", "").rstrip("0"))


def _listed(values: Sequence[object]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last
