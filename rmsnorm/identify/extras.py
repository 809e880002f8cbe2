"""What some take beside the parameters: a mask of the elements that count, and a residual that is added first."""

from __future__ import annotations

from typing import Any

import numpy as np

from rmsnorm.identify.findings import Notebook
from rmsnorm.identify.form import close
from rmsnorm.identify.layout import Layout
from rmsnorm.identify.model import Model
from rmsnorm.identify.session import Session
from rmsnorm.numpy_impl import rms_norm
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError


def solve_extras(session: Session, model: Model, notes: Notebook) -> None:
    """Ask with a mask and with a residual, where the target takes them."""
    if not model.plain or session.layout.group or not session.layout.endless:
        return
    for role, ask in (("mask", _mask), ("residual", _residual)):
        if role in session.target.arguments:
            try:
                ask(session, model, notes)
            except TargetError as error:
                notes.unseen(role, str(error))


def _pose(session: Session) -> tuple[Array, dict[str, Array], dict[str, Any]]:
    """Rows, neutral parameters, and the golden's axes."""
    random = np.random.default_rng(18)
    rows = random.normal(0.1, 1.0, (session.step, session.n))
    x, given = session.arguments(rows, session.accepts[-1] if session.wide not in session.accepts else session.wide)
    layout: Layout = session.layout
    return x, given, {"axis": layout.axes, "feature_axis": layout.feature_axes}


def _golden(model: Model, x: Array, given: dict[str, Array], axes: dict[str, Any], mask: Array | None = None) -> Array:
    y = rms_norm(x, given.get("scale"), given.get("bias"), variant=model.variant, mask=mask, **axes)
    return np.asarray(y, np.float64)


def _mask(session: Session, model: Model, notes: Notebook) -> None:
    x, given, axes = _pose(session)
    layout, count = session.layout, session.step
    mask = np.random.default_rng(19).random(x.shape) < 0.6
    rows = layout.take(mask, count).copy()
    rows[2] = False
    mask = layout.place(rows)

    def compare(y: Array, want: Array) -> bool:
        a, b = (np.where(rows, layout.take(part.astype(np.float64), count), 0.0) for part in (y, want))
        return close(a, b, 1e-3)

    y = session.target.forward(x, **given, mask=mask)
    if compare(y, _golden(model, x, given, axes)):
        notes.found("mask", "ignored", "y of what counts is the same without the mask")
        notes.defect("the mask is ignored")
        return
    if not compare(y, _golden(model, x, given, axes, mask=mask)):
        notes.found("mask", "otherwise", "y is not what the mean over the elements that count gives")
        return
    empty = layout.take(y.astype(np.float64), count)[2]
    left = "0" if np.all(empty == 0) else "NaN" if np.isnan(empty).all() else "not 0"
    rows[2] = True  # a row with nothing counted has a finding of its own
    mask = layout.place(rows)
    hidden = np.where(mask, x, np.nan).astype(x.dtype)
    told = "a mean over the elements that count"
    if session.target.differentiable:
        dy = np.where(mask, 1.0, 0.0).astype(x.dtype)
        scale, bias = (given.get(role) for role in ("scale", "bias"))
        rest = {role: value for role, value in given.items() if role not in ("scale", "bias")}
        rows[2] = True  # a row with nothing counted has its own finding
        found = session.target.gradients(
            np.where(mask | ~layout.place(rows), hidden, hidden), scale, bias, dy, mask=mask, **rest
        )
        reached = found[1] is not None and bool(np.isnan(found[1].astype(np.float64)).any())
        notes.found("nan_under_mask", "reaches the gradient" if reached else "kept out",
                    f"dscale is {'NaN' if reached else 'finite'} with NaN under the mask")  # fmt: skip
    notes.found("mask", "counts", told)
    notes.found("empty_row", left, "y of a row with nothing counted")


def _residual(session: Session, model: Model, notes: Notebook) -> None:
    x, given, axes = _pose(session)
    residual = session.layout.place(np.random.default_rng(20).normal(size=(session.step, session.n))).astype(x.dtype)
    y = session.target.forward(x, **given, residual=residual).astype(np.float64)
    if close(y, _golden(model, x + residual, given, axes), 1e-3):
        notes.found("residual", "added", "y is that of x + residual")
    elif close(y, _golden(model, x, given, axes), 1e-3):
        notes.found("residual", "ignored", "y is the same without it")
        notes.defect("the residual is not added")
    else:
        notes.found("residual", "otherwise", "y is not that of x + residual")
