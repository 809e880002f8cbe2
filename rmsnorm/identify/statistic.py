"""The denominator: which elements enter it, what of them, divided by what, and eps with its place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from rmsnorm import dtypes
from rmsnorm.identify.findings import Notebook
from rmsnorm.identify.form import Form, NotRms
from rmsnorm.identify.layout import ROWS
from rmsnorm.identify.session import Session
from rmsnorm.targets.bridges import Array

_COARSE: Final = 2.0**-6
_RANGE: Final = {"float16": (3, -13), "bfloat16": (20, -58), "float32": (20, -58), "float64": (20, -220)}


@dataclass(frozen=True)
class Statistic:
    """rho of a row.

    Attributes:
        kind: mean_square or variance.
        divisor: of the sum of squares; factor: of y, where the divisor does not explain it.
        eps, position: as in a Variant.
        eps_of_max: eps is multiplied by max|x|^2.
        noise: relative error of the measured 1 / rho.
        story: of eps.
    """

    kind: Literal["mean_square", "variance"]
    divisor: Literal["k", "k - 1", "n", "1"]
    factor: float
    eps: float
    position: Literal["inside", "outside", "clamp"]
    eps_of_max: bool
    noise: float
    story: str


def responding(session: Session, which: Array) -> Array:
    """For each of the elements j: which y_i of a row change when x_j grows tenfold; y_j itself does not count."""
    random = np.random.default_rng(7)
    n = session.n
    base = random.uniform(0.5, 1.5, n) * random.choice([-1.0, 1.0], n)
    rows = np.tile(base, (len(which) + 1, 1))
    rows[np.arange(len(which)), which] = 4 * math.sqrt(n) * np.sign(base[which])
    y = session.rows(rows).astype(np.float64)
    changed = ~(np.abs(y[:-1] - y[-1]) <= 0.05 * np.max(np.abs(y[-1])))
    changed[np.arange(len(which)), which] = False
    return changed


def find_group(session: Session) -> int | None:
    """Size of the groups of the last axis that are normalised apart, None for one.

    Raises:
        NotRms: no element changes another one, or not as in a normalisation.
    """
    n = session.n
    which = np.unique(np.concatenate([np.arange(min(n, 64)), np.linspace(0, n - 1, 64).astype(int)]))
    answer = responding(session, which)
    if n > 1 and not answer.any():
        raise NotRms("no element of x changes another one's y: nothing is normalised")
    sizes = set()
    for j, changed in zip(which, answer, strict=True):
        members = np.union1d(np.flatnonzero(changed), [j])
        if changed.any():
            if members[-1] - members[0] + 1 != len(members):
                raise NotRms("the elements that are normalised together do not lie together")
            sizes.add((len(members), int(members[0]) % len(members)))
    if len(sizes) == 1 and (size := next(iter(sizes)))[0] < n and size[1] == 0 and n % size[0] == 0:
        return size[0]
    if any(size != n for size, _ in sizes):
        raise NotRms("x_j changes some y_i of its row and not others")
    return None


def counted(session: Session) -> tuple[int, Literal["all", "first", "last"]]:
    """How many elements of a row enter the statistic, and from which end.

    Raises:
        NotRms: those that count are neither the first nor the last ones.
    """
    n = session.n
    if n == 1:
        return 1, "all"
    low, high = 0, n - 1
    while True:
        which = np.unique(np.linspace(low, high, 66).astype(int))
        inside: Array = np.asarray(responding(session, which).any(axis=1))
        borders = np.flatnonzero(inside[1:] != inside[:-1])
        if inside.all():
            return n, "all"
        if len(borders) != 1:
            raise NotRms("the elements that enter the statistic are neither the first nor the last ones")
        low, high = int(which[borders[0]]), int(which[borders[0] + 1])
        if high == low + 1:
            return (high, "first") if inside[0] else (n - high, "last")


def inverse_rms(x: Array, y: Array, *, centred: bool) -> Array:
    """1 / rho of rows from y = x / rho, or (x - mean) / rho, by least squares."""
    a = x - x.mean(-1, keepdims=True) if centred else x
    scale = np.max(np.abs(a), axis=-1, keepdims=True)
    scaled = a / np.where(scale > 0, scale, 1.0)
    return (scaled * y).sum(-1) / (scaled**2).sum(-1) / np.where(scale > 0, scale, 1.0)[:, 0]


def solve_statistic(session: Session, form: Form, k: int, end: str, notes: Notebook) -> Statistic:
    """Solve for rho on large rows, then for eps on ever smaller ones.

    Raises:
        NotRms: rho is no function of the sum of squares and of the sum.
    """
    n = session.n
    top, _ = _RANGE[session.wide]
    random = np.random.default_rng(8)
    rows = random.normal(size=(32, n))
    rows[8:16] += np.linspace(-3, 3, 8)[:, None]
    rows[16:24, 0 if end != "last" else n - 1] = 3 * math.sqrt(n) * random.uniform(0.5, 1.0, 8)
    rows = _held(rows, session.wide)
    big = rows * 2.0**top
    with np.errstate(all="ignore"):
        rho = 1 / inverse_rms(big, session.unit(big), centred=form.centred) / 2.0**top
    chosen = np.arange(n) < k if end != "last" else np.arange(n) >= n - k
    part = np.where(chosen, rows, 0.0)
    columns = np.stack([(part**2).sum(-1), part.sum(-1) ** 2 / k, np.max(np.abs(rows), axis=-1) ** 2], axis=1)
    if not np.all(np.isfinite(rho)) or np.any(rho <= 0):
        raise NotRms("y is 0 or not finite for large rows")
    weight = 1 / rho[:, None] ** 2
    used = columns if k > 1 else columns[:, :1]
    solved = np.linalg.lstsq(used * weight, np.ones(len(rows)), rcond=None)[0]
    per, minus, spiked = np.concatenate([solved, np.zeros(3)])[:3] if k > 1 else (solved[0], 0.0, 0.0)
    fitted = used @ solved
    if np.any(fitted <= 0) or np.max(np.abs(rho / np.sqrt(np.maximum(fitted, 1e-300)) - 1)) > _COARSE:
        raise NotRms("the denominator is no function of the row's sum of squares and sum")
    noise = float(max(np.sqrt(np.mean((rho / np.sqrt(fitted) - 1) ** 2)), dtypes.unit_roundoff("float64")))
    variance = -minus / per > 0.5
    if not (abs(minus / per) < 0.05 or abs(minus / per + 1) < 0.05):
        raise NotRms("the denominator mixes the mean and the mean square in another proportion than a variance")
    divisor, factor = _divisor(1 / per, k, n, noise)
    shares = spiked / per
    of_max = shares * math.sqrt(n) > max(100 * noise, 1e-9) and divisor == "k" and not variance
    eps, position, story = solve_eps(session, form, noise, k)
    if of_max and eps == 0:
        eps = float(spiked)
        story = f"the denominator is sqrt(q + {eps:.3g} max|x|^2) at every size of x: eps was not rescaled with x"
    if factor != 1:
        eps = eps * factor**2 if position == "inside" else eps * factor
    return Statistic(
        kind="variance" if variance else "mean_square",
        divisor=divisor,
        factor=factor,
        eps=nice(eps, max(noise, 2e-4) if of_max else noise),
        position=position,
        eps_of_max=bool(of_max and eps),
        noise=noise,
        story=story,
    )


def _held(rows: Array, dtype: str) -> Array:
    return rows.astype(dtype).astype(np.float64)


def _divisor(size: float, k: int, n: int, noise: float) -> tuple[Literal["k", "k - 1", "n", "1"], float]:
    """What the sum of squares is divided by; else k, and the factor on y that makes up for it."""
    tolerance = min(max(20 * noise, 1e-6), 0.02)
    names: dict[Literal["k", "k - 1", "n", "1"], int] = {"k": k, "k - 1": k - 1, "n": n, "1": 1}
    near = {name: abs(size / max(value, 1) - 1) for name, value in names.items() if value > 0}
    best = min(near, key=lambda name: (near[name] > tolerance / 4, near[name] if near[name] > tolerance / 4 else 0))
    return (best, 1.0) if near[best] <= tolerance else ("k", math.sqrt(size / k))


def solve_eps(
    session: Session, form: Form, noise: float, k: int
) -> tuple[float, Literal["inside", "outside", "clamp"], str]:
    """eps from rho(s x) / s, which is constant but for eps: each place makes its own curve."""
    top, bottom = _RANGE[session.wide]
    random = np.random.default_rng(9)
    row = _held(random.uniform(0.5, 1.5, session.n) * random.choice([-1.0, 1.0], session.n), session.wide)

    def ladder(exponents: Array) -> tuple[Array, Array]:
        s = 2.0**exponents
        rows = s[:, None] * row
        with np.errstate(all="ignore"):
            return s, 1 / inverse_rms(rows, session.unit(rows), centred=form.centred)

    coarse = np.linspace(top, bottom, ROWS).round()
    with np.errstate(all="ignore"):
        s, rho = ladder(coarse)
        length = float(np.median(rho[:8] / s[:8]))
        bent = np.flatnonzero(rho / (s * length) > 1.5)
        if len(bent) and coarse[0] - coarse[-1] > ROWS:
            middle = coarse[bent[0]]
            s, rho = ladder(np.arange(middle + ROWS / 2, middle - ROWS / 2, -1))
        t = rho / (s * length)
        curves = {
            "inside": np.sqrt(np.maximum(t**2 - 1, 0)) * s * length,
            "outside": (t - 1) * s * length,
            "clamp": t * s * length,
        }
    valid = np.isfinite(t) & (rho > 0)
    seen = valid & (t - 1 > max(50 * noise, 1e-12))
    if np.count_nonzero(seen) < 3:
        least = float((s * length)[valid][-1]) if valid.any() else math.nan
        return 0.0, "inside", f"x / rho does not change with the size of x, down to an RMS of {least:.0e}"
    bend = seen & (t < 64) & (t - 1 > max(1e3 * noise, 1e-6))
    bend = bend if np.count_nonzero(bend) >= 3 else seen & (t < 64)
    spread = {place: float(np.std(np.log(np.maximum(curve[bend], 1e-300)))) for place, curve in curves.items()}
    place = min(spread, key=spread.__getitem__)
    far = seen & (t > 2) if np.count_nonzero(seen & (t > 2)) >= 3 else seen
    if _straight(curves, seen, place, noise):
        far = seen
    value = float(np.median(curves[place][far]))
    eps = {"inside": value**2, "outside": value, "clamp": value * math.sqrt(k)}[place]
    formula = {"inside": "sqrt(q + eps)", "outside": "sqrt(q) + eps", "clamp": "max(sqrt(q), eps / sqrt(k))"}[place]
    others = ", ".join(f"{name} {100 * spread[name]:.2g} %" for name in spread if name != place)
    story = (
        f"rho = {formula} with eps = {eps:.4g} holds within {100 * spread[place]:.2g} % on rows of ever smaller norm "
        f"({others})"
    )
    return eps, place, story  # type: ignore[return-value]


def _straight(curves: dict[str, Array], seen: Array, place: str, noise: float) -> bool:
    """Whether the curve of the place is flat everywhere, so that every row may take part in the estimate."""
    found = curves[place][seen]
    return bool(len(found) < 6 and np.ptp(found) <= 100 * noise * np.median(found))


def nice(value: float, noise: float) -> float:
    """The number that was probably written: a machine epsilon, or the one of fewest digits within the noise.

    >>> nice(9.999973e-07, 1e-6), nice(1.1920930e-07, 1e-8)
    (1e-06, 1.1920928955078125e-07)
    """
    tolerance = min(max(20 * noise, 1e-7), 5e-3)
    for name in dtypes.FLOATS:
        if abs(value / dtypes.epsilon(name) - 1) <= min(tolerance, 1e-3):
            return dtypes.epsilon(name)
    for digits in range(12):
        candidate = float(f"{value:.{digits}e}")
        if value == 0 or abs(candidate / value - 1) <= tolerance:
            return candidate
    return value
