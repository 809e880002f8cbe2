"""Two arguments beside the parameters: a mask of the elements that count, and a residual that is added first."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from rmsnorm import dtypes
from rmsnorm.accuracy.bounds import FORMULA, SAME_BITS_OF_SUM
from rmsnorm.identify.findings import Findings, Learned, not_observable
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


def solve_extras(session: Session, model: Model, findings: Findings) -> Variant:
    """Ask with a mask and with a residual, where the target takes them: the variant, with what it does with these."""
    if not model.plain or session.layout.group or not session.layout.unlimited:
        return model.variant
    if session.takes("mask"):
        try:
            _mask(session, model, findings)
        except TargetError as error:
            findings.mask = not_observable(str(error))
    if session.takes("residual"):
        try:
            _residual(session, model, findings)
        except TargetError as error:
            findings.residual = not_observable(str(error))
    rounding = findings.residual_rounding
    return model.variant if rounding is None else model.variant.replace(residual_rounding=rounding.value)


def _pose(session: Session) -> tuple[Array, dict[str, Array]]:
    """x and neutral parameters."""
    rows = np.random.default_rng(18).normal(0.1, 1.0, (session.step, session.n))
    return session.prepare(rows, session.wide if session.wide in session.accepts else session.accepts[-1])


def _golden(
    session: Session, model: Model, x: Array, parameters: Mapping[str, Array], mask: Array | None = None
) -> Array:
    axes: dict[str, Any] = {"axis": session.layout.axes, "feature_axis": session.layout.feature_axes}
    y = rms_norm(x, parameters.get("scale"), parameters.get("bias"), variant=model.variant, mask=mask, **axes)
    return np.asarray(y, np.float64)


def _mask(session: Session, model: Model, findings: Findings) -> None:
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
    if agrees(y, _golden(session, model, x, parameters)):
        findings.mask = Learned("ignored", "y of the elements that count is the same without the mask")
        findings.defect("the mask is ignored")
        return
    if not agrees(y, _golden(session, model, x, parameters, mask)):
        findings.mask = Learned("otherwise", "y is not that of a mean over the elements that count")
        return
    if session.target.differentiable:
        rows[2] = True  # a row with nothing counted has a finding of its own
        reached = _nan_reaches_dscale(session, x, layout.to_x(rows), parameters)
        findings.nan_under_mask = Learned(
            "reaches the gradient" if reached else "kept out",
            f"dscale is {'NaN' if reached else 'finite'} with NaN under the mask",
        )
    findings.mask = Learned("counts", "a mean over the elements that count")
    empty = layout.to_rows(y.astype(np.float64), count)[2]
    content = "0" if np.all(empty == 0) else "NaN" if np.isnan(empty).all() else "not 0"
    findings.empty_row = Learned(content, "y of a row with nothing counted")


def _nan_reaches_dscale(session: Session, x: Array, mask: Array, parameters: Mapping[str, Array]) -> bool:
    hidden = np.where(mask, x, np.nan).astype(x.dtype)
    dy = np.where(mask, 1.0, 0.0).astype(x.dtype)
    others = {argument: array for argument, array in parameters.items() if argument not in ("scale", "bias")}
    scale, bias = parameters.get("scale"), parameters.get("bias")
    _, dscale, _ = session.target.gradients(hidden, scale, bias, dy, mask=mask, **others)
    return dscale is not None and bool(np.isnan(dscale.astype(np.float64)).any())


def _residual(session: Session, model: Model, findings: Findings) -> None:
    x, parameters = _pose(session)
    residual = session.layout.to_x(np.random.default_rng(20).normal(size=(session.step, session.n))).astype(x.dtype)
    y = session.target.forward(x, **parameters, residual=residual).astype(np.float64)
    if close(y, _golden(session, model, x + residual, parameters), FORMULA):
        findings.residual = Learned("added", "y is that of x + residual")
        _rounded_sum(session, model, findings)
    elif close(y, _golden(session, model, x, parameters), FORMULA):
        findings.residual = Learned("ignored", "y is the same without it")
        findings.defect("the residual is not added")
    else:
        findings.residual = Learned("otherwise", "y is not that of x + residual")


def _rounded_sum(session: Session, model: Model, findings: Findings) -> None:
    """Where the sum is rounded, and the normalised row, which shows where x and the residual have 16 bits."""
    random = np.random.default_rng(25)
    gain: dict[str, Any] = {"scale": session.parameter("scale", random, 0.5, 2.0)} if session.takes("scale") else {}
    own = model.variant.rounding
    for dtype in (name for name in ("bfloat16", "float16") if name in session.accepts):
        x, parameters = session.prepare(random.normal(0.1, 1.0, (session.step, session.n)), dtype, **gain)
        residual = session.layout.to_x(random.normal(size=(session.step, session.n))).astype(x.dtype)
        y = session.target.forward(x, **parameters, residual=residual)
        _returned_sum(session, x, residual, findings)
        axes: dict[str, Any] = {"axis": session.layout.axes, "feature_axis": session.layout.feature_axes}
        shares = {}
        for order, rounding in product(_ROUNDED, [own, *(name for name in _ROUNDINGS if name != own)]):
            variant = model.variant.replace(residual_rounding=order, rounding=rounding)
            want, _ = rms_norm(
                x, parameters.get("scale"), parameters.get("bias"), variant=variant, residual=residual,
                out_dtype=y.dtype.name, **axes,
            )  # fmt: skip
            shares[order, rounding] = float(np.mean(want == y))
        order, rounding = max(shares, key=lambda names: shares[names])
        same = f"{100 * shares[order, rounding]:.4g} % of y are its bits in {dtypes.short(dtype)}"
        as_without = max(shares[o, own] for o in _ROUNDED)
        if findings.rounding is not None and shares[order, rounding] > SAME_BITS_OF_SUM > as_without:
            findings.rounding_with_residual = Learned(rounding, f"{_ROUNDINGS[rounding]}: {same}")
            findings.defect(f"with a residual {_ROUNDINGS[rounding]}, without one {_ROUNDINGS[own]}")
        if shares[order, rounding] > SAME_BITS_OF_SUM > min(shares[o, rounding] for o in _ROUNDED):
            findings.residual_rounding = Learned(order, f"{_ROUNDED[order]}: {same}")
            return


def _returned_sum(session: Session, x: Array, residual: Array, findings: Findings) -> None:
    second = session.target.second
    if second is not None:
        want = add(x, residual, x.dtype.name)
        same = second.shape == want.shape and second.dtype == want.dtype and np.array_equal(second, want)
        value = "rounded" if same else "otherwise"
        findings.returned_sum = Learned(
            value, f"the second result, {second.dtype.name}, beside x + residual rounded once"
        )
