"""The denominator rho: which elements enter it, what of them, by what their sum is divided, and eps.

It is measured at the width of the probe and at two others, where the target takes them: there a number that depends
on the width shows that it is no constant. At one width both readings are said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from rmsnorm.accuracy.bounds import EPS_SPREAD, FORM, roundings_of_row, within
from rmsnorm.identify.counted import find_counted, with_fraction
from rmsnorm.identify.findings import NotRms
from rmsnorm.identify.identity import Kind
from rmsnorm.identify.layout import ROWS
from rmsnorm.identify.model import Model
from rmsnorm.identify.probe import Probe
from rmsnorm.identify.readings import FORMS, ONE, Denominator, K, nice, readings
from rmsnorm.specification import dtypes
from rmsnorm.specification.variants import EpsPosition
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError

# powers of two by which rows are multiplied, the largest (eps and roundings are small beside it) and the smallest
_EXPONENTS: Final = {"float16": (3, -13), "bfloat16": (20, -58), "float32": (20, -58), "float64": (20, -220)}
_MULTIPLES: Final = (2, 3, 4, 0.5, 0.25)  # of the first width: a target may take only some of them
_MORE: Final = 2  # of these are tried: two points fit any power of n, a third one does not fit a wrong one
_KINDS: Final[dict[Kind, str]] = {
    "layernorm": "the mean is subtracted from x and in the statistic",
    "rmsnorm": "x divided by the root of its mean square, whatever its mean",
    "l2norm": "x divided by the root of its sum of squares at every width: its norm, with eps beside that",
}
_POWERS: Final = {  # of the root that x is divided by, and not the first
    -1: "multiplied by the root of its {}, not divided by it, as by x / rsqrt(q + eps)",
    2: "divided by its {}, not by the root of it",
    -2: "multiplied by its {}, not divided by the root of it",
    0.5: "divided by the fourth root of its {}, not by the square root",
}
_FORMULAS: Final[Mapping[EpsPosition, str]] = {
    "inside": "sqrt(q + eps)", "outside": "sqrt(q) + eps", "clamp": "max(sqrt(q), eps / sqrt(k))",
}  # fmt: skip


def kind_of(model: Model) -> Kind:
    """The kind of norm that the model is."""
    return "layernorm" if model.centred else "rmsnorm"


def solve_denominator(probe: Probe, model: Model) -> Model:
    """The model with all of its denominator.

    Raises:
        NotRms: it is that of no RMSNorm.
    """
    first = _measured(probe)
    if model.centred and first.kind != "variance":
        raise NotRms("the mean is subtracted in the numerator but not in the denominator")
    if first.kind == "variance" and not model.centred:
        raise NotRms("x is divided by the root of its variance, not of its mean square")
    kind = kind_of(model)
    probe.findings.add("kind", kind, _KINDS[kind])
    others = _at_other_widths(probe)
    known = {rho.n: rho.k for rho in [*others, first]}
    model = with_fraction(probe, model, first.of, known)
    return _with_reading(probe, model, [first, *others])


def _at_other_widths(probe: Probe) -> list[Denominator]:
    """The denominator at two other widths, or at fewer where it takes no more."""
    measured: list[Denominator] = []
    for width, other in probe.other_widths(_MULTIPLES):
        try:
            with other.target.evaluating():
                measured.append(_measured(other))
        except TargetError:
            continue
        except NotRms as reason:
            probe.findings.defect(f"with {width} elements in a row it is not what it is with {probe.n}: {reason}")
            return []
        if len(measured) == _MORE:
            break
    return measured


def _measured(probe: Probe) -> Denominator:
    """The denominator at the width of a probe.

    Raises:
        NotRms: it is none of an RMSNorm.
    """
    return _with_eps(probe, _with_size(probe, Denominator(find_counted(probe))))


@np.errstate(all="ignore")
def _with_size(probe: Probe, measured: Denominator) -> Denominator:
    """What the sum of squares is divided by, and whether the mean is subtracted, from rho of large rows.

    Raises:
        NotRms: rho is no function of the sum of squares and of the sum.
    """
    n, k = measured.n, measured.k
    random = np.random.default_rng(8)
    rows = random.normal(size=(32, n))
    rows[8:16] += np.linspace(-3, 3, 8)[:, None]
    rows[16:24, 0] = 3 * math.sqrt(n) * random.uniform(0.5, 1.0, 8)
    rows = rows.astype(probe.wide).astype(np.float64)
    size = 2.0 ** _EXPONENTS[probe.wide][0]
    rho = 1 / probe.inverse_rms(rows * size) / size
    part = np.where(np.arange(n) < k, rows, 0.0)
    columns = np.stack([(part**2).sum(-1), part.sum(-1) ** 2 / k, np.max(np.abs(rows), axis=-1) ** 2], axis=1)
    if not np.all(np.isfinite(rho)) or np.any(rho <= 0):
        raise NotRms("y is 0 or not finite for large rows")
    weight = 1 / rho[:, None] ** 2
    used = columns if k > 1 else columns[:, :1]
    solved = np.linalg.lstsq(used * weight, np.ones(len(rows)), rcond=None)[0]
    per, minus, spiked = np.append(solved, np.zeros(3))[:3]
    fitted = used @ solved
    if np.any(fitted <= 0) or np.max(np.abs(rho / np.sqrt(np.maximum(fitted, 1e-300)) - 1)) > FORM:
        _require_no_other_power(rho * size, size, used, k)
        raise NotRms("the denominator is no function of the row's sum of squares and sum")
    if np.max(np.abs(used[:, :2] @ solved[:2]) / fitted) < FORM:
        raise NotRms("the denominator is the largest |x| of a row, not its root mean square")
    noise = float(max(np.sqrt(np.mean((rho / np.sqrt(fitted) - 1) ** 2)), dtypes.unit_roundoff("float64")))
    variance = -minus / per > 0.5
    if not (abs(minus / per) < 0.05 or abs(minus / per + 1) < 0.05):
        raise NotRms("the denominator mixes the mean and the mean square, but not as a variance does")
    of_mean = abs(1 / (per * k) - 1) <= within(noise)
    # Beside an outlier a sum errs to one side, which the fit takes for a share of max^2: by the roundings of a row.
    least = max(4 * noise * roundings_of_row(n), 1e-9 / math.sqrt(n))
    rescaled = spiked / per > least and of_mean and not variance
    of_max = float(spiked) if rescaled else 0.0
    return replace(
        measured, kind="variance" if variance else "mean_square", size=float(1 / per), of_max=of_max, noise=noise
    )


def _require_no_other_power(denominator: Array, size: float, columns: Array, k: int) -> None:
    """Raises NotRms if rows of that size are divided by another power of the root than the first."""
    for power, words in _POWERS.items():
        rho = denominator ** (1 / power) / size
        weight = 1 / rho[:, None] ** 2
        if not np.all(np.isfinite(weight)):
            continue
        solved = np.linalg.lstsq(columns * weight, np.ones(len(rho)), rcond=None)[0]
        fitted = columns @ solved
        if np.all(fitted > 0) and np.max(np.abs(rho / np.sqrt(fitted) - 1)) <= FORM:
            is_variance = len(solved) > 1 and -solved[1] * k / solved[0] > 0.5
            raise NotRms(f"x is {words}".format("variance" if is_variance else "mean square"))


@np.errstate(all="ignore")
def _with_eps(probe: Probe, measured: Denominator) -> Denominator:
    """eps from rho(s x) / s, which only eps makes depend on s: every position of eps gives another curve."""
    noise = measured.noise
    top, bottom = _EXPONENTS[probe.wide]
    random = np.random.default_rng(9)
    row = random.uniform(0.5, 1.5, probe.n) * random.choice([-1.0, 1.0], probe.n)
    row = row.astype(probe.wide).astype(np.float64)

    def rho_at(exponents: Array) -> tuple[Array, Array]:
        s = 2.0**exponents
        return s, 1 / probe.inverse_rms(s[:, None] * row)

    coarse = np.linspace(top, bottom, ROWS).round()
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
            measured,
            eps=0.0,
            position="inside",
            evidence=f"x / rho does not change with the size of x, down to an RMS of {least:.0e}",
        )
    bend = seen & (t < 64) & (t - 1 > max(1e3 * noise, 1e-6))
    bend = bend if np.count_nonzero(bend) >= 3 else seen & (t < 64)
    spread = {name: float(np.std(np.log(np.maximum(curves[name][bend], 1e-300)))) for name in _FORMULAS}
    position = min(_FORMULAS, key=spread.__getitem__)
    far = seen & (t > 2) if np.count_nonzero(seen & (t > 2)) >= 3 else seen
    value = float(np.median(curves[position][far]))
    eps = {"inside": value**2, "outside": value, "clamp": value * math.sqrt(measured.k)}[position]
    others = ", ".join(f"{name} {100 * spread[name]:.2g} %" for name in _FORMULAS if name != position)
    if spread[position] > max(EPS_SPREAD, 50 * noise):
        raise NotRms(
            f"x / rho depends on the size of x, but not as eps makes it: of {', '.join(_FORMULAS.values())} the best, "
            f"{_FORMULAS[position]}, holds within {100 * spread[position]:.2g} %"
        )
    evidence = (
        f"rho = {_FORMULAS[position]} with eps = {{eps}} holds within {100 * spread[position]:.2g} % on rows of ever "
        f"smaller norm ({others})"
    )
    return replace(measured, eps=eps, position=position, evidence=evidence)


def _with_reading(probe: Probe, model: Model, measured: Sequence[Denominator]) -> Model:
    """The model with the first reading that is true at every width, and eps in each dtype."""
    first, findings = measured[0], probe.findings
    several = len({rho.n for rho in measured}) > 1
    kinds = {(rho.kind, rho.position) for rho in measured if rho.eps}
    differ = len(kinds) > 1
    true = readings(measured) if several and not differ else []
    chosen, *others = true or readings([first])
    said = chosen.sentences(first, several=bool(true))
    is_of_sums = chosen.size == ONE and chosen.factor == ONE and (chosen.eps.form == "1" or first.eps == 0)
    if is_of_sums and kind_of(model) == "rmsnorm":
        findings.add("kind", "l2norm", _KINDS["l2norm"])
    for name, term in (("divisor", chosen.size), ("factor", chosen.factor)):
        if name in said:
            value = term.at(first)
            findings.add(name, int(value) if value == int(value) else value, said[name])
    widths = _listed([rho.n for rho in measured])
    if several and not true:
        findings.defect(
            f"with {widths} elements in a row it computes different norms" if differ
            else f"the denominator depends on the width in no known way: with {widths} elements in a row the sum of "
            f"squares is divided by {_listed([f'{rho.size:.4g}' for rho in measured])}, "
            f"and eps is {_listed([f'{rho.eps:.4g}' for rho in measured])}"
        )  # fmt: skip
    else:
        findings.defect(*said.values())
    if several:
        solved = "at which the denominator was solved" if true else "the denominator below is that of the first"
        findings.add("widths", widths, f"elements in a row, {solved}")
    else:
        why = "no other width could be tried" if len(measured) == 1 else "the groups have this size at every width"
        more = "; it may also be that " + others[0].sentences(first, several=False)["eps"] if others else ""
        findings.add("widths", str(first.n), f"{why}: a number that depends on n cannot be told from a constant{more}")
    scale = FORMS[chosen.eps.form](first)
    size = None if chosen.size == K else chosen.size.at(first)
    model = replace(model, size=size, factor=chosen.factor.at(first), eps_scale=scale)
    return _eps_by_dtype(probe, model, first, chosen.eps.times, chosen.unit(first) / scale, said.get("eps", ""))


def _listed(values: Sequence[object]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last


def _eps_by_dtype(probe: Probe, model: Model, first: Denominator, value: float, unit: float, words: str) -> Model:
    """The model with eps in each dtype: one number, or the machine epsilon of the arithmetic.

    Args:
        probe: of the target.
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
        evidence = f"the denominator is sqrt(q + {of_max:.3g} max|x|^2) at every size of x: eps was not rescaled with x"
        value = nice(first.eps or of_max, max(first.noise, 2e-4))
        probe.findings.defect(f"eps is not rescaled with x / max|x|: it acts as {value:.3g} max|x|^2")
    probe.findings.add("eps_position", *((position, evidence) if value else (None, "eps is 0")))
    by_dtype = {probe.wide: value} | ({} if of_max else _in_other_dtypes(probe, first, unit))
    wide = {dtype: eps for dtype, eps in by_dtype.items() if dtype not in dtypes.HALF}
    single = wide.get("float32", next(iter(wide.values()), value))
    final = _named_eps(probe, value, single, wide, f"{words}; {evidence}" if words else evidence)
    narrow = {dtype: eps for dtype, eps in by_dtype.items() if dtype in dtypes.HALF}
    if not single or abs(narrow.get("bfloat16", single) / single - 1) < 0.1:
        narrow = {}  # in float16 alone it is the eps itself, or the square, that has become subnormal
    for dtype, eps in narrow.items():
        machine = ", its machine epsilon," if eps == dtypes.epsilon(dtype) else ""
        probe.findings.add(f"eps in {dtype}", eps, f"solved from {dtype} rows; {single:.3g} in wider dtypes")
        probe.findings.defect(f"eps is {eps:.3g}{machine} for {dtype} x, and {single:.3g} in wider dtypes")
    variant = model.variant.replace(eps=final, eps_position=position)
    return replace(model, variant=variant, eps_of_max=bool(of_max), narrow_eps=tuple(narrow.items()))


def _in_other_dtypes(probe: Probe, first: Denominator, unit: float) -> dict[str, float]:
    """eps in the other dtypes that the target accepts, where it has the same position and is not 0."""
    by_dtype = {}
    for dtype in probe.accepts:
        if dtype == probe.wide:
            continue
        noise = first.noise if dtype == "float64" else max(first.noise, 4 * dtypes.unit_roundoff(dtype))
        measured = _with_eps(replace(probe, wide=dtype), replace(first, noise=noise))
        if measured.position == first.position and measured.eps * unit:
            by_dtype[dtype] = nice(measured.eps * unit, noise)
    return by_dtype


def _named_eps(probe: Probe, value: float, single: float, wide: dict[str, float], evidence: str) -> float | None:
    """eps as in a Variant: None where it is the machine epsilon of the arithmetic."""
    machine, double = dtypes.epsilon("float32"), dtypes.epsilon("float64")
    if single != machine or (probe.wide == "float64" and wide.get("float64", double) != double):
        probe.findings.add("eps", value, evidence)
        return value
    in_double = f", {wide['float64']:.4g} in float64" if "float64" in wide else ""
    probe.findings.add("eps", "machine epsilon", f"{machine:.4g} in float32{in_double}; {evidence}")
    return None
