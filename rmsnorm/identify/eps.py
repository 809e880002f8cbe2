"""eps: its place in the denominator, and its value in each dtype, from rows of ever smaller norm."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np

from rmsnorm import dtypes
from rmsnorm.accuracy.bounds import EPS_SPREAD, within
from rmsnorm.identify.findings import Learned, NotRms, not_observable
from rmsnorm.identify.layout import ROWS
from rmsnorm.identify.model import Model
from rmsnorm.identify.session import Session
from rmsnorm.identify.statistic import EXPONENTS, Seen, find_counted, solve_statistic
from rmsnorm.targets.bridges import Array
from rmsnorm.variants import EpsPosition

_POSITIONS: Final[tuple[EpsPosition, ...]] = ("inside", "outside", "clamp")
_FORMULAS: Final = {"inside": "sqrt(q + eps)", "outside": "sqrt(q) + eps", "clamp": "max(sqrt(q), eps / sqrt(k))"}


def look(session: Session) -> Seen:
    """The denominator at the width of a session.

    Raises:
        NotRms: it is none of an RMSNorm.
    """
    return measure(session, solve_statistic(session, find_counted(session)))


def solve_eps(session: Session, model: Model, first: Seen, value: float, unit: float, words: str) -> Model:
    """The model with eps in each dtype: one number, or the machine epsilon of the arithmetic.

    Args:
        session: of the target.
        model: with all else of the denominator.
        first: what its first width shows.
        value: eps in the widest dtype, as somebody wrote it, and ``unit`` that over what is measured.
        words: how eps depends on the width, empty where it does not.
    """
    position, of_max = first.position, first.of_max
    evidence = first.evidence.format(eps=f"{value * model.eps_scale:.4g}")
    if model.size is not None:
        evidence = evidence.replace("sqrt(k)", f"sqrt({model.size:.7g})")
    if of_max:
        if value == 0:
            evidence = (
                f"the denominator is sqrt(q + {of_max:.3g} max|x|^2) at every size of x: eps was not rescaled with x"
            )
        value = nice(first.eps or of_max, max(first.noise, 2e-4))
        session.findings.defect(f"eps is not rescaled with x / max|x|: it acts as {value:.3g} max|x|^2")
    session.findings.eps_position = Learned(position, evidence) if value else not_observable("eps is 0")
    by_dtype = {session.wide: value} | ({} if of_max else _in_other_dtypes(session, first, unit))
    wide = {dtype: eps for dtype, eps in by_dtype.items() if dtype not in dtypes.HALF}
    single = wide.get("float32", next(iter(wide.values()), value))
    final = _name(session, value, single, wide, f"{words}; {evidence}" if words else evidence)
    narrow = {dtype: eps for dtype, eps in by_dtype.items() if dtype in dtypes.HALF}
    if not single or abs(narrow.get("bfloat16", single) / single - 1) < 0.1:
        narrow = {}  # in float16 alone it is the eps itself, or the square, that has become subnormal
    for dtype, eps in narrow.items():
        machine = ", its machine epsilon," if eps == dtypes.epsilon(dtype) else ""
        session.findings.narrow_eps[dtype] = Learned(eps, f"solved from {dtype} rows; {single:.3g} in wider dtypes")
        session.findings.defect(f"eps is {eps:.3g}{machine} for {dtype} x, and {single:.3g} in wider dtypes")
    variant = model.variant.replace(eps=final, eps_position=position)
    return replace(model, variant=variant, eps_of_max=bool(of_max), narrow_eps=tuple(narrow.items()))


def _in_other_dtypes(session: Session, first: Seen, unit: float) -> dict[str, float]:
    """eps in the other dtypes that the target accepts, where it has the same position and is not 0."""
    by_dtype = {}
    for dtype in session.accepts:
        if dtype == session.wide:
            continue
        noise = first.noise if dtype == "float64" else max(first.noise, 4 * dtypes.unit_roundoff(dtype))
        seen = measure(replace(session, wide=dtype), replace(first, noise=noise))
        if seen.position == first.position and seen.eps * unit:
            by_dtype[dtype] = nice(seen.eps * unit, noise)
    return by_dtype


def _name(session: Session, value: float, single: float, wide: dict[str, float], evidence: str) -> float | None:
    """eps as in a Variant: None where it is the machine epsilon of the arithmetic."""
    machine, double = dtypes.epsilon("float32"), dtypes.epsilon("float64")
    if single != machine or wide.get("float64", double) not in (double, machine):
        session.findings.eps = Learned(value, evidence)
        return value
    if wide.get("float64") == machine and session.wide == "float64":
        session.findings.eps = Learned(machine, evidence + "; float64 has the same")
        return machine
    in_double = f", {wide['float64']:.4g} in float64" if "float64" in wide else ""
    session.findings.eps = Learned("machine epsilon", f"{machine:.4g} in float32{in_double}; {evidence}")
    return None


def measure(session: Session, looked: Seen) -> Seen:
    """eps from rho(s x) / s, which only eps makes depend on s: every position of eps gives another curve."""
    noise = looked.noise
    top, bottom = EXPONENTS[session.wide]
    random = np.random.default_rng(9)
    row = random.uniform(0.5, 1.5, session.n) * random.choice([-1.0, 1.0], session.n)
    row = row.astype(session.wide).astype(np.float64)

    def rho_at(exponents: Array) -> tuple[Array, Array]:
        s = 2.0**exponents
        rows = s[:, None] * row
        with np.errstate(all="ignore"):
            return s, 1 / session.inverse_rms(rows)

    coarse = np.linspace(top, bottom, ROWS).round()
    with np.errstate(all="ignore"):
        s, rho = rho_at(coarse)
        length = float(np.median(rho[:8] / s[:8]))
        bent = np.flatnonzero(rho / (s * length) > 1.5)
        if len(bent) and coarse[0] - coarse[-1] > ROWS:
            middle = coarse[bent[0]]
            s, rho = rho_at(np.arange(middle + ROWS / 2, middle - ROWS / 2, -1))
        t = rho / (s * length)
        curves: dict[EpsPosition, Array] = {
            "inside": np.sqrt(np.maximum(t**2 - 1, 0)) * s * length,
            "outside": (t - 1) * s * length,
            "clamp": t * s * length,
        }
    valid = np.isfinite(t) & (rho > 0)
    seen = valid & (t - 1 > max(50 * noise, 1e-12))
    if np.count_nonzero(seen) < 3:
        least = float((s * length)[valid][-1]) if valid.any() else math.nan
        return replace(
            looked,
            eps=0.0,
            position="inside",
            evidence=f"x / rho does not change with the size of x, down to an RMS of {least:.0e}",
        )
    bend = seen & (t < 64) & (t - 1 > max(1e3 * noise, 1e-6))
    bend = bend if np.count_nonzero(bend) >= 3 else seen & (t < 64)
    spread = {name: float(np.std(np.log(np.maximum(curves[name][bend], 1e-300)))) for name in _POSITIONS}
    position = min(_POSITIONS, key=spread.__getitem__)
    far = seen & (t > 2) if np.count_nonzero(seen & (t > 2)) >= 3 else seen
    if _straight(curves[position][seen], noise):
        far = seen
    value = float(np.median(curves[position][far]))
    eps = {"inside": value**2, "outside": value, "clamp": value * math.sqrt(looked.k)}[position]
    others = ", ".join(f"{name} {100 * spread[name]:.2g} %" for name in _POSITIONS if name != position)
    if spread[position] > max(EPS_SPREAD, 50 * noise):
        raise NotRms(
            f"x / rho depends on the size of x, but not as eps makes it: of {', '.join(_FORMULAS.values())} the best, "
            f"{_FORMULAS[position]}, holds within {100 * spread[position]:.2g} %"
        )
    evidence = (
        f"rho = {_FORMULAS[position]} with eps = {{eps}} holds within {100 * spread[position]:.2g} % on rows of ever "
        f"smaller norm ({others})"
    )
    return replace(looked, eps=eps, position=position, evidence=evidence)


def _straight(curve: Array, noise: float) -> bool:
    """Whether a curve is flat everywhere, so that every row may take part in the estimate."""
    return bool(len(curve) < 6 and np.ptp(curve) <= 100 * noise * np.median(curve))


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
