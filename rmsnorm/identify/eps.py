"""eps: its place in the denominator, and its value in each dtype, from rows of ever smaller norm."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rmsnorm import dtypes
from rmsnorm.accuracy.bounds import EPS_SPREAD
from rmsnorm.identify.findings import Findings, Learned, NotRms, not_observable
from rmsnorm.identify.layout import ROWS
from rmsnorm.identify.session import Session
from rmsnorm.identify.statistic import EXPONENTS, Statistic, inverse_rms
from rmsnorm.targets.bridges import Array
from rmsnorm.variants import EpsPosition

_POSITIONS: Final[tuple[EpsPosition, ...]] = ("inside", "outside", "clamp")
_FORMULAS: Final = {"inside": "sqrt(q + eps)", "outside": "sqrt(q) + eps", "clamp": "max(sqrt(q), eps / sqrt(k))"}


@dataclass(frozen=True)
class Measured:
    """eps as the rows of one dtype show it, and what was seen; 0 where x / rho does not change with the size of x.

    The value is that for y without a factor.
    """

    value: float
    position: EpsPosition
    evidence: str

    def says(self, eps: float) -> str:
        """The evidence, for the eps that the denominator has."""
        return self.evidence.format(eps=f"{eps:.4g}")


@dataclass(frozen=True)
class Eps:
    """eps of a target.

    Attributes:
        value: as in a Variant: None for the machine epsilon of the arithmetic dtype.
        position: as in a Variant.
        of_max: eps is multiplied by max|x|^2.
        narrow: eps for 16-bit x, by dtype, where it is another.
    """

    value: float | None
    position: EpsPosition
    of_max: bool = False
    narrow: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Denominator:
    """y = factor h / rho, with rho of the sum of squares over ``size`` and of eps times ``scale``, at this width.

    Attributes:
        size: None for k.
        eps: as in a Variant, as it was solved from the rows of the widest dtype.
        unit: eps over that which is measured.
        words: how eps depends on the width, empty where it does not.
    """

    size: float | None = None
    factor: float = 1.0
    eps: float = 0.0
    scale: float = 1.0
    unit: float = 1.0
    words: str = ""


def solve_eps(
    session: Session,
    statistic: Statistic,
    measured: Measured,
    denominator: Denominator,
    k: int,
    findings: Findings,
    *,
    centred: bool,
) -> Eps:
    """Find eps in each dtype: one number, or the machine epsilon of the arithmetic; ``measured`` is in the widest."""
    value, noise, unit, words = denominator.eps, statistic.noise, denominator.unit, denominator.words
    evidence = measured.says(value * denominator.scale)
    if denominator.size is not None:
        evidence = evidence.replace("sqrt(k)", f"sqrt({denominator.size:.7g})")
    if statistic.of_max and value == 0:
        value = statistic.of_max
        evidence = f"the denominator is sqrt(q + {value:.3g} max|x|^2) at every size of x: eps was not rescaled with x"
    if statistic.of_max:
        value = nice(measured.value or value, max(noise, 2e-4))
        findings.defect(f"eps is not rescaled with x / max|x|: it acts as {value:.3g} max|x|^2")
    if value == 0:
        findings.eps_position = not_observable("eps is 0")
    else:
        findings.eps_position = Learned(measured.position, evidence)
    by_dtype = {session.wide: value}
    if not statistic.of_max:
        by_dtype |= _in_other_dtypes(session, statistic, measured.position, k, unit=unit, centred=centred)
    wide = {dtype: eps for dtype, eps in by_dtype.items() if dtype not in dtypes.HALF}
    single = wide.get("float32", next(iter(wide.values()), value))
    final = _name(session, value, single, wide, f"{words}; {evidence}" if words else evidence, findings)
    narrow = {dtype: eps for dtype, eps in by_dtype.items() if dtype in dtypes.HALF}
    if not single or abs(narrow.get("bfloat16", single) / single - 1) < 0.1:
        narrow = {}  # in float16 alone it is the eps itself, or the square, that has become subnormal
    for dtype, eps in narrow.items():
        machine = ", its machine epsilon," if eps == dtypes.epsilon(dtype) else ""
        findings.narrow_eps[dtype] = Learned(eps, f"solved from {dtype} rows; {single:.3g} in wider dtypes")
        findings.defect(f"eps is {eps:.3g}{machine} for {dtype} x, and {single:.3g} in wider dtypes")
    return Eps(final, measured.position, bool(statistic.of_max), tuple(narrow.items()))


def _in_other_dtypes(
    session: Session, statistic: Statistic, position: EpsPosition, k: int, *, unit: float, centred: bool
) -> dict[str, float]:
    """eps in the other dtypes that the target accepts, where it has the same position and is not 0."""
    by_dtype = {}
    for dtype in session.accepts:
        if dtype == session.wide:
            continue
        noise = statistic.noise if dtype == "float64" else max(statistic.noise, 4 * dtypes.unit_roundoff(dtype))
        measured = measure(replace(session, wide=dtype), noise, k, centred=centred)
        value = measured.value * unit
        if measured.position == position and value:
            by_dtype[dtype] = nice(value, noise)
    return by_dtype


def _name(
    session: Session, value: float, single: float, wide: dict[str, float], evidence: str, findings: Findings
) -> float | None:
    """eps as in a Variant: None where it is the machine epsilon of the arithmetic."""
    machine, double = dtypes.epsilon("float32"), dtypes.epsilon("float64")
    if single != machine or wide.get("float64", double) not in (double, machine):
        findings.eps = Learned(value, evidence)
        return value
    if wide.get("float64") == machine and session.wide == "float64":
        findings.eps = Learned(machine, evidence + "; float64 has the same")
        return machine
    in_double = f", {wide['float64']:.4g} in float64" if "float64" in wide else ""
    findings.eps = Learned("machine epsilon", f"{machine:.4g} in float32{in_double}; {evidence}")
    return None


def measure(session: Session, noise: float, k: int, *, centred: bool) -> Measured:
    """eps from rho(s x) / s, which only eps makes depend on s: every position of eps gives another curve."""
    top, bottom = EXPONENTS[session.wide]
    random = np.random.default_rng(9)
    row = random.uniform(0.5, 1.5, session.n) * random.choice([-1.0, 1.0], session.n)
    row = row.astype(session.wide).astype(np.float64)

    def rho_at(exponents: Array) -> tuple[Array, Array]:
        s = 2.0**exponents
        rows = s[:, None] * row
        with np.errstate(all="ignore"):
            return s, 1 / inverse_rms(rows, session.unit(rows), centred=centred)

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
        return Measured(0.0, "inside", f"x / rho does not change with the size of x, down to an RMS of {least:.0e}")
    bend = seen & (t < 64) & (t - 1 > max(1e3 * noise, 1e-6))
    bend = bend if np.count_nonzero(bend) >= 3 else seen & (t < 64)
    spread = {name: float(np.std(np.log(np.maximum(curves[name][bend], 1e-300)))) for name in _POSITIONS}
    position = min(_POSITIONS, key=spread.__getitem__)
    far = seen & (t > 2) if np.count_nonzero(seen & (t > 2)) >= 3 else seen
    if _straight(curves[position][seen], noise):
        far = seen
    value = float(np.median(curves[position][far]))
    eps = {"inside": value**2, "outside": value, "clamp": value * math.sqrt(k)}[position]
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
    return Measured(eps, position, evidence)


def _straight(curve: Array, noise: float) -> bool:
    """Whether a curve is flat everywhere, so that every row may take part in the estimate."""
    return bool(len(curve) < 6 and np.ptp(curve) <= 100 * noise * np.median(curve))


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
