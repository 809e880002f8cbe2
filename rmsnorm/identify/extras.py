"""Two arguments beside the parameters: a mask of the elements that count, and a residual that is added first."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from rmsnorm import dtypes
from rmsnorm.accuracy.bounds import FORMULA, SAME_BITS_OF_SUM
from rmsnorm.identify.form import close
from rmsnorm.identify.model import Model
from rmsnorm.identify.session import Session
from rmsnorm.numpy_impl import rms_norm
from rmsnorm.numpy_impl.arithmetic import add
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError
from rmsnorm.variants import Rounding, Variant

_ROUNDED = {
    "before": "the statistic is of the sum after it is rounded",
    "after": "the statistic is of the sum before it is rounded",
}


_ROUNDINGS: dict[Rounding, str] = {
    "before_scale": "the normalised row is rounded before the gain",
    "after_scale": "y is rounded once, after the gain",
    "input_dtype": "every step is rounded",
}


def solve_extras(session: Session, model: Model) -> Variant:
    """Ask with a mask and with a residual, where the target takes them: the variant, with what it does with these."""
    if not model.plain or session.layout.group or not session.layout.unlimited:
        return model.variant
    for argument, ask in (("mask", _mask), ("residual", _residual)):
        if session.takes(argument):
            try:
                ask(session, model.variant)
            except TargetError as error:
                session.findings.add(argument, None, str(error))
    rounding = session.findings["residual_rounding"]
    return model.variant if rounding is None else model.variant.replace(residual_rounding=rounding.value)


def _pose(session: Session) -> tuple[Array, dict[str, Array]]:
    """x and neutral parameters."""
    rows = np.random.default_rng(18).normal(0.1, 1.0, (session.step, session.n))
    return session.prepare(rows, session.wide if session.wide in session.accepts else session.accepts[-1])


def _golden(session: Session, variant: Variant, x: Array, parameters: Mapping[str, Array], **options: Any) -> Any:
    axes: dict[str, Any] = {"axis": session.layout.axes, "feature_axis": session.layout.feature_axes}
    return rms_norm(x, parameters.get("scale"), parameters.get("bias"), variant=variant, **axes, **options)


def _mask(session: Session, variant: Variant) -> None:
    x, parameters = _pose(session)
    layout, count = session.layout, session.step
    rows = layout.to_rows(np.random.default_rng(19).random(x.shape) < 0.6, count).copy()
    rows[2] = False
    mask = layout.to_x(rows)

    def agrees(y: Array, want: Array) -> bool:
        """At the elements that count."""
        a, b = (np.where(rows, layout.to_rows(part.astype(np.float64), count), 0.0) for part in (y, want))
        return close(a, b, FORMULA)

    y = session.target.forward(x, **parameters, mask=mask)
    if agrees(y, _golden(session, variant, x, parameters)):
        session.findings.add("mask", "ignored", "y of the elements that count is the same without the mask")
        session.findings.defect("the mask is ignored")
        return
    if not agrees(y, _golden(session, variant, x, parameters, mask=mask)):
        session.findings.add("mask", "otherwise", "y is not that of a mean over the elements that count")
        return
    if session.target.differentiable:
        rows[2] = True  # a row with nothing counted has a finding of its own
        mask = layout.to_x(rows)
        arrays = {"x": np.where(mask, x, np.nan).astype(x.dtype), **parameters, "mask": mask}
        dscale = session.target.all_gradients(np.where(mask, 1.0, 0.0).astype(x.dtype), **arrays).get("scale")
        reached = dscale is not None and bool(np.isnan(dscale.astype(np.float64)).any())
        session.findings.add(
            "nan_under_mask",
            "reaches the gradient" if reached else "kept out",
            f"dscale is {'NaN' if reached else 'finite'} with NaN under the mask",
        )
    session.findings.add("mask", "counts", "a mean over the elements that count")
    empty = layout.to_rows(y.astype(np.float64), count)[2]
    content = "0" if np.all(empty == 0) else "NaN" if np.isnan(empty).all() else "not 0"
    session.findings.add("empty_row", content, "y of a row with nothing counted")


def _residual(session: Session, variant: Variant) -> None:
    x, parameters = _pose(session)
    residual = session.layout.to_x(np.random.default_rng(20).normal(size=(session.step, session.n))).astype(x.dtype)
    y = session.target.forward(x, **parameters, residual=residual).astype(np.float64)
    if close(y, _golden(session, variant, x + residual, parameters).astype(np.float64), FORMULA):
        session.findings.add("residual", "added", "y is that of x + residual")
        _rounded_sum(session, variant)
    elif close(y, _golden(session, variant, x, parameters).astype(np.float64), FORMULA):
        session.findings.add("residual", "ignored", "y is the same without it")
        session.findings.defect("the residual is not added")
    else:
        session.findings.add("residual", "otherwise", "y is not that of x + residual")


def _rounded_sum(session: Session, variant: Variant) -> None:
    """Where the sum is rounded, and the normalised row, which shows where x and the residual have 16 bits."""
    random = np.random.default_rng(25)
    gain: dict[str, Any] = {"scale": session.parameter("scale", random, 0.5, 2.0)} if session.takes("scale") else {}
    own = variant.rounding
    for dtype in (name for name in ("bfloat16", "float16") if name in session.accepts):
        x, parameters = session.prepare(random.normal(0.1, 1.0, (session.step, session.n)), dtype, **gain)
        residual = session.layout.to_x(random.normal(size=(session.step, session.n))).astype(x.dtype)
        y = session.target.forward(x, **parameters, residual=residual)
        if (second := session.target.second) is not None:
            want = add(x, residual, x.dtype.name)
            alike = second.shape == want.shape and second.dtype == want.dtype and np.array_equal(second, want)
            evidence = f"the second result, {second.dtype.name}, beside x + residual rounded once"
            session.findings.add("returned_sum", "rounded" if alike else "otherwise", evidence)
        shares = {}
        for order, rounding in product(_ROUNDED, [own, *(name for name in _ROUNDINGS if name != own)]):
            trial = variant.replace(residual_rounding=order, rounding=rounding)
            want, _ = _golden(session, trial, x, parameters, residual=residual, out_dtype=y.dtype.name)
            shares[order, rounding] = float(np.mean(want == y))
        order, rounding = max(shares, key=lambda names: shares[names])
        same = f"{100 * shares[order, rounding]:.4g} % of y are its bits in {dtypes.short(dtype)}"
        as_without = max(shares[o, own] for o in _ROUNDED)
        if session.findings["rounding"] is not None and shares[order, rounding] > SAME_BITS_OF_SUM > as_without:
            session.findings.add("rounding_with_residual", rounding, f"{_ROUNDINGS[rounding]}: {same}")
            session.findings.defect(f"with a residual {_ROUNDINGS[rounding]}, without one {_ROUNDINGS[own]}")
        if shares[order, rounding] > SAME_BITS_OF_SUM > min(shares[o, rounding] for o in _ROUNDED):
            session.findings.add("residual_rounding", order, f"{_ROUNDED[order]}: {same}")
            return
