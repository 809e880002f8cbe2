"""The denominator: which elements enter it, what of them, and by what their sum is divided."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from rmsnorm import dtypes
from rmsnorm.accuracy.bounds import CHANGED, FORM, within
from rmsnorm.identify.findings import Learned, NotRms
from rmsnorm.identify.session import Session
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError
from rmsnorm.variants import EpsPosition

_UNEVEN: Final = "x_j changes some y_i of its row and not others"
# powers of two by which rows are multiplied, the largest (eps and roundings are small beside it) and the smallest
EXPONENTS: Final = {"float16": (3, -13), "bfloat16": (20, -58), "float32": (20, -58), "float64": (20, -220)}


@dataclass(frozen=True)
class Seen:
    """The denominator at one width, as far as it was asked.

    Attributes:
        n, k: elements of a row, and how many of them enter the statistic.
        end: from which end these are counted.
        kind: mean_square or variance.
        size: what the sum of squares is divided by, if y has no factor.
        of_max: rho^2 grows by so many max|x|^2; 0 where it does not.
        noise: relative error of the measured 1 / rho.
        eps, position: for y without a factor; eps is 0 where x / rho does not change with the size of x.
        evidence: what was seen of eps, with ``{eps}`` for the eps that the denominator has.
    """

    n: int
    k: int
    end: Literal["all", "first", "last"]
    kind: Literal["mean_square", "variance"] = "mean_square"
    size: float = 0.0
    of_max: float = 0.0
    noise: float = 0.0
    eps: float = 0.0
    position: EpsPosition = "inside"
    evidence: str = ""

    @property
    def counted(self) -> Array:
        """Which elements of a row enter the statistic."""
        order = np.arange(self.n)
        return order >= self.n - self.k if self.end == "last" else order < self.k


def responding(session: Session, which: Array) -> Array:
    """For every element j of ``which``: the y_i of a row that change when x_j grows tenfold, without y_j itself."""
    random = np.random.default_rng(7)
    n = session.n
    any_changed = np.zeros((len(which), n), bool)
    for sign in (1.0, -1.0):  # in a narrow row what the mean and the variance do to one y_i may cancel
        base = random.uniform(0.5, 1.5, n) * random.choice([-1.0, 1.0], n)
        rows = np.tile(base, (len(which) + 1, 1))
        rows[np.arange(len(which)), which] = sign * 4 * math.sqrt(n) * np.sign(base[which])
        y = session.rows(rows).astype(np.float64)
        any_changed |= ~(np.abs(y[:-1] - y[-1]) <= CHANGED * np.max(np.abs(y[-1])))
    any_changed[np.arange(len(which)), which] = False
    return any_changed


def grouped(session: Session) -> Session:
    """The session with the groups of the last axis that are normalised apart, if there are any.

    At another width the whole of a row may turn out to be one group, and the number of groups may stay as it is.

    Raises:
        NotRms: no element changes another one, or not as in a normalisation.
    """
    layout, words = session.layout, ""
    if layout.axes == (len(layout.sizes) - 1,):
        n, group = session.n, _group(session)
        for width, other in session.other_widths((2, 3, 4)):
            try:
                with other.target.evaluating():
                    wider = _group(other)
            except (NotRms, TargetError):
                continue
            if group is None and wider == n:
                group = n
            elif group and wider == group * (width // n):
                words = f"; there are {n // group} groups at a width of {width}, too, of {wider} elements"
            elif wider != group:
                session.findings.defect(
                    f"the groups have {group or n} elements at a width of {n}, and {wider or width} at {width}"
                )
            break
        layout = replace(layout, group=group, groups=n // group if group and words else None)
    shape = str(list(layout.shape(4 if layout.unlimited else 1))).replace(" ", "")
    session.findings.axes = Learned(layout.description, f"where y changes when one element of x {shape} does")
    if layout.group:
        session.findings.group_size = Learned(layout.group, f"elements of the last axis that change one another{words}")
    return replace(session, layout=layout)


def _group(session: Session) -> int | None:
    """Size of the groups of the last axis that are normalised apart, None for one group."""
    n = session.n
    which = np.unique(np.concatenate([np.arange(min(n, 64)), np.linspace(0, n - 1, 64).astype(int)]))
    answer = responding(session, which)
    if n > 1 and not answer.any():
        raise NotRms("no element of x changes another one's y: nothing is normalised")
    groups = set()  # their sizes, and where their first elements lie
    for j, changed in zip(which, answer, strict=True):
        members = np.union1d(np.flatnonzero(changed), [j])
        if changed.any():
            if members[-1] - members[0] + 1 != len(members):
                raise NotRms(_UNEVEN)
            groups.add((len(members), int(members[0]) % len(members)))
    if len(groups) == 1:
        ((size, start),) = groups
        if size < n and start == 0 and n % size == 0:
            return size
    if any(size != n for size, _ in groups):
        raise NotRms(_UNEVEN)
    return None


def find_counted(session: Session) -> Seen:
    """The elements of a row that enter the statistic.

    Raises:
        NotRms: they are neither the first nor the last ones.
    """
    n = session.n
    if n == 1:
        return Seen(1, 1, "all")
    low, high = 0, n - 1
    while True:
        which = np.unique(np.linspace(low, high, 66).astype(int))
        inside: Array = np.asarray(responding(session, which).any(axis=1))
        borders = np.flatnonzero(inside[1:] != inside[:-1])
        if inside.all():
            return Seen(n, n, "all")
        if len(borders) != 1:
            raise NotRms("the elements that enter the statistic are neither the first nor the last ones")
        low, high = int(which[borders[0]]), int(which[borders[0] + 1])
        if high == low + 1:
            return Seen(n, high, "first") if inside[0] else Seen(n, n - high, "last")


def solve_statistic(session: Session, seen: Seen) -> Seen:
    """Solve for rho on large rows.

    Raises:
        NotRms: rho is no function of the sum of squares and of the sum.
    """
    n, k = seen.n, seen.k
    random = np.random.default_rng(8)
    rows = random.normal(size=(32, n))
    rows[8:16] += np.linspace(-3, 3, 8)[:, None]
    rows[16:24, 0 if seen.end != "last" else n - 1] = 3 * math.sqrt(n) * random.uniform(0.5, 1.0, 8)
    rows = rows.astype(session.wide).astype(np.float64)
    size = 2.0 ** EXPONENTS[session.wide][0]
    with np.errstate(all="ignore"):
        rho = 1 / session.inverse_rms(rows * size) / size
    part = np.where(seen.counted, rows, 0.0)
    columns = np.stack([(part**2).sum(-1), part.sum(-1) ** 2 / k, np.max(np.abs(rows), axis=-1) ** 2], axis=1)
    if not np.all(np.isfinite(rho)) or np.any(rho <= 0):
        raise NotRms("y is 0 or not finite for large rows")
    weight = 1 / rho[:, None] ** 2
    used = columns if k > 1 else columns[:, :1]
    solved = np.linalg.lstsq(used * weight, np.ones(len(rows)), rcond=None)[0]
    per, minus, spiked = np.concatenate([solved, np.zeros(3)])[:3] if k > 1 else (solved[0], 0.0, 0.0)
    fitted = used @ solved
    if np.any(fitted <= 0) or np.max(np.abs(rho / np.sqrt(np.maximum(fitted, 1e-300)) - 1)) > FORM:
        raise NotRms("the denominator is no function of the row's sum of squares and sum")
    if np.max(np.abs(used[:, :2] @ solved[:2]) / fitted) < FORM:
        raise NotRms("the denominator is the largest |x| of a row, not its root mean square")
    noise = float(max(np.sqrt(np.mean((rho / np.sqrt(fitted) - 1) ** 2)), dtypes.unit_roundoff("float64")))
    variance = -minus / per > 0.5
    if not (abs(minus / per) < 0.05 or abs(minus / per + 1) < 0.05):
        raise NotRms("the denominator mixes the mean and the mean square, but not as a variance does")
    of_mean = abs(1 / (per * k) - 1) <= within(noise)
    rescaled = spiked / per * math.sqrt(n) > max(100 * noise, 1e-9) and of_mean and not variance
    of_max = float(spiked) if rescaled else 0.0
    return replace(
        seen, kind="variance" if variance else "mean_square", size=float(1 / per), of_max=of_max, noise=noise
    )
