"""At the ends of the range: overflow, underflow, rows of zeros, NaN and infinity; and float64."""

from __future__ import annotations

from typing import Final

import numpy as np

from rmsnorm import dtypes
from rmsnorm.identify.findings import Notebook
from rmsnorm.identify.model import Model
from rmsnorm.identify.session import Session
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError

_HUGE: Final = {"float16": 2.0**12, "bfloat16": 2.0**66, "float32": 2.0**66, "float64": 2.0**600}
_TINY: Final = {"float16": 2.0**-12, "bfloat16": 2.0**-100, "float32": 2.0**-100, "float64": 2.0**-600}


def solve_behaviour(session: Session, model: Model, notes: Notebook) -> None:
    """Ask for rows at the ends of each dtype, and say what came of them."""
    overflow, underflow, zero, nan, infinity = {}, {}, {}, {}, {}
    for dtype in session.accepts:
        random = np.random.default_rng(12)
        row = random.uniform(0.5, 1.5, session.n) * random.choice([-1.0, 1.0], session.n)
        row = row.astype(dtype).astype(np.float64)
        rows = np.stack([row * _HUGE[dtype], row * _TINY[dtype], 0 * row, row, row, row])
        rows[3, 0], rows[4, 0] = np.nan, np.inf
        try:
            y = session.unit(rows, dtype)
        except TargetError as error:
            notes.defect(str(error))
            continue
        eps = model.eps_for(dtype)
        want = [
            row * model.inverse_rms(row[None], _scaled(eps, size, model))[0] for size in (_HUGE[dtype], _TINY[dtype])
        ]
        if model.centred:
            want = [part - part.mean() for part in want]
        overflow[dtype] = _judge(y[0], want[0])
        seen = np.any(np.abs(want[1]) > 1e-2)  # with eps, tiny rows give tiny results anywhere
        underflow[dtype] = _judge(y[1], want[1]) if seen else "right"
        zero[dtype], nan[dtype], infinity[dtype] = _value(y[2]), _value(y[3]), _value(y[4])
        if not np.array_equal(y[5], session.unit(rows[5:], dtype)[0]):
            notes.defect(f"a row of {dtype} y depends on NaN and infinity in other rows")
    sizes = {dtype: f"{_HUGE[dtype]:.0e}" for dtype in overflow}
    _gather("overflow", overflow, "x of about " + ", ".join(f"{sizes[d]} in {dtypes.short(d)}" for d in sizes), notes)
    _gather(
        "underflow", underflow, "x of about " + ", ".join(f"{_TINY[d]:.0e} in {dtypes.short(d)}" for d in sizes), notes
    )
    for name, found in (("zero_row", zero), ("nan", nan), ("infinity", infinity)):
        _gather(
            name,
            found,
            {"zero_row": "a row of zeros", "nan": "one NaN in a row", "infinity": "one infinity in a row"}[name],
            notes,
        )
    _float64(session, model, notes)


def _scaled(eps: float, size: float, model: Model) -> float:
    """eps for rows that are divided by their size."""
    square = model.variant.eps_position == "inside" and not model.eps_of_max
    with np.errstate(all="ignore"):
        return float(np.float64(eps) / size / (size if square else 1.0)) if eps and not model.eps_of_max else eps


def _judge(y: Array, want: Array) -> str:
    if not np.all(np.isfinite(y)):
        return "NaN" if np.isnan(y).any() else "infinity"
    if np.all(y == 0):
        return "0"
    return "right" if np.max(np.abs(y - want)) < 0.02 * np.max(np.abs(want)) else "wrong"


def _value(y: Array) -> str:
    if np.isnan(y).all():
        return "NaN"
    if np.isnan(y).any():
        return "NaN at some elements" if np.any(y != 0) else "NaN"
    return "0" if np.all(y == 0) else "finite" if np.all(np.isfinite(y)) else "infinite"


def _gather(name: str, found: dict[str, str], asked: str, notes: Notebook) -> None:
    if not found:
        return
    values = set(found.values())
    if len(values) == 1:
        notes.found(name, values.pop(), asked)
    else:
        text = "; ".join(
            f"{value} in {', '.join(dtypes.short(d) for d in found if found[d] == value)}"
            for value in dict.fromkeys(found.values())
        )
        notes.found(name, text, asked)


def _float64(session: Session, model: Model, notes: Notebook) -> None:
    """Whether float64 is kept, or goes through float32."""
    if "float64" not in session.accepts:
        notes.unseen("float64", "it takes no float64 x")
        return
    random = np.random.default_rng(13)
    rows = random.normal(size=(8, session.n))
    y, narrow = session.rows(rows, "float64"), session.rows(rows.astype(np.float32).astype(np.float64), "float64")
    if y.dtype != np.float64:
        notes.found("float64", f"down-cast to {y.dtype.name}", f"y of float64 x is {y.dtype.name}")
    elif np.array_equal(y, narrow):
        notes.found("float64", "down-cast to float32", "y does not change when float64 x is rounded to float32")
    else:
        unit = session.unit(rows, "float64")
        want = rows * model.inverse_rms(rows, model.eps_for("float64")) * model.factor
        error = float(np.max(np.abs(unit - want)) / np.max(np.abs(want)))
        if not model.centred and 1e-10 < error < 1e-6:
            notes.found(
                "float64", "statistic in float32", f"x / rho is off by {error:.0e}, and changes with every bit of x"
            )
        else:
            notes.found("float64", "kept", "y changes with the bits that float32 does not have")
