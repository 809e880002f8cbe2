"""At the ends of the range: overflow, underflow, rows of zeros, NaN and infinity; and float64."""

from __future__ import annotations

from typing import Final

import numpy as np

from rmsnorm.accuracy.bounds import IN_RANGE
from rmsnorm.identify.model import Model
from rmsnorm.identify.probe import Probe
from rmsnorm.specification import dtypes
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError

_HUGE: Final = {"float16": 2.0**12, "bfloat16": 2.0**66, "float32": 2.0**66, "float64": 2.0**600}
_TINY: Final = {"float16": 2.0**-12, "bfloat16": 2.0**-100, "float32": 2.0**-100, "float64": 2.0**-600}


def solve_extremes(probe: Probe, model: Model) -> None:
    """Ask for rows at the ends of each dtype, and report what comes back."""
    answers: dict[str, dict[str, str]] = {}  # a word by question and dtype
    for dtype in probe.accepts:
        random = np.random.default_rng(12)
        row = random.uniform(0.5, 1.5, probe.n) * random.choice([-1.0, 1.0], probe.n)
        row = row.astype(dtype).astype(np.float64)
        rows = np.stack([row * _HUGE[dtype], row * _TINY[dtype], 0 * row, row, row, row])
        rows[3, 0], rows[4, 0] = np.nan, np.inf
        try:
            y = probe.unit(rows, dtype)
        except TargetError as error:
            probe.findings.defect(str(error))
            continue
        huge, tiny = (
            row * model.inverse_rms(row[None], _scaled(model, dtype, size[dtype]))[0] * model.factor
            for size in (_HUGE, _TINY)
        )
        if model.centred:
            huge, tiny = huge - huge.mean(), tiny - tiny.mean()
        visible = np.any(np.abs(tiny) > 1e-2)  # with eps, tiny rows give tiny results anywhere
        words = {"overflow": _outcome(y[0], huge), "underflow": _outcome(y[1], tiny) if visible else "right"}
        words |= {name: _content(part) for name, part in zip(("zero_row", "nan", "infinity"), y[2:5], strict=True)}
        for name, word in words.items():
            answers.setdefault(name, {})[dtype] = word
        rows[3:5] = row
        if not np.array_equal(y[5], probe.unit(rows, dtype)[5]):
            probe.findings.defect(f"a row of {dtype} y depends on NaN and infinity in other rows")
    asked = {"zero_row": "a row of zeros", "nan": "one NaN in a row", "infinity": "one infinity in a row"}
    for name, size in (("overflow", _HUGE), ("underflow", _TINY)):
        sizes = [f"{size[dtype]:.0e} in {dtypes.short(dtype)}" for dtype in answers.get(name, ())]
        asked[name] = f"x of about {', '.join(sizes)}"
    for name, by_dtype in answers.items():
        seen = list(dict.fromkeys(by_dtype.values()))  # one word where all dtypes have the same
        where = {word: ", ".join(dtypes.short(d) for d in by_dtype if by_dtype[d] == word) for word in seen}
        value = "; ".join(f"{word} in {names}" for word, names in where.items()) if len(seen) > 1 else seen[0]
        probe.findings.add(name, value, asked[name])


def _scaled(model: Model, dtype: str, size: float) -> float:
    """eps for rows that are divided by their size."""
    eps = np.float64(model.eps_for(dtype))
    if model.eps_of_max or not eps:
        return float(eps)
    with np.errstate(all="ignore"):
        return float(eps / size / (size if model.variant.eps_position == "inside" else 1.0))


def _outcome(y: Array, want: Array) -> str:
    if not np.all(np.isfinite(y)):
        return "NaN" if np.isnan(y).any() else "infinity"
    if np.all(y == 0):
        return "0"
    return "right" if np.max(np.abs(y - want)) < IN_RANGE * np.max(np.abs(want)) else "wrong"


def _content(y: Array) -> str:
    if np.isnan(y).all():
        return "NaN"
    if np.isnan(y).any():
        return "NaN at some elements" if np.any(y != 0) else "NaN"
    return "0" if np.all(y == 0) else "finite" if np.all(np.isfinite(y)) else "infinite"


def solve_float64(probe: Probe, model: Model) -> bool:
    """Whether float64 is kept: it may go through float32, or the statistic may."""
    if "float64" not in probe.accepts:
        probe.findings.add("float64", None, "it takes no float64 x")
        return False
    rows = np.random.default_rng(13).normal(size=(8, probe.n))
    y, narrow = probe.rows(rows, "float64"), probe.rows(rows.astype(np.float32).astype(np.float64), "float64")
    if y.dtype != np.float64:
        probe.findings.add("float64", f"down-cast to {y.dtype.name}", f"y of float64 x is {y.dtype.name}")
        return False
    if np.array_equal(y, narrow):
        probe.findings.add("float64", "down-cast to float32", "y does not change when float64 x is rounded to float32")
        return False
    want = rows * model.inverse_rms(rows, model.eps_for("float64")) * model.factor
    error = float(np.max(np.abs(probe.unit(rows, "float64") - want)) / np.max(np.abs(want)))
    if not model.centred and 1e-10 < error < 1e-6:
        evidence = f"x / rho is off by {error:.0e}, and changes with every bit of x"
        probe.findings.add("float64", "statistic in float32", evidence)
        return False
    probe.findings.add("float64", "kept", "y changes with the bits that float32 does not have")
    return True
