"""Two arguments beside the parameters: a mask of the elements that count, and a residual that is added first."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from rmsnorm.accuracy.bounds import FORMULA, SAME_BITS_OF_SUM
from rmsnorm.identify.affine import close
from rmsnorm.identify.model import Model
from rmsnorm.identify.probe import Probe
from rmsnorm.numpy_impl import rms_norm
from rmsnorm.numpy_impl.arithmetic import add
from rmsnorm.specification import dtypes
from rmsnorm.specification.variants import Rounding, Variant
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError

_ROUNDED = {
    "before": "the statistic is of the sum after it is rounded",
    "after": "the statistic is of the sum before it is rounded",
}


_ROUNDINGS: dict[Rounding, str] = {
    "before_scale": "the normalised row is rounded before the gain",
    "after_scale": "y is rounded once, after the gain",
    "input_dtype": "every step is rounded",
}


def solve_mask_and_residual(probe: Probe, model: Model) -> Variant:
    """Ask with a mask and with a residual, where the target takes them: the variant, with what it does with these."""
    if not model.plain or probe.layout.group or not probe.layout.unlimited:
        return model.variant
    for argument, ask in (("mask", _mask), ("residual", _residual)):
        if probe.takes(argument):
            try:
                ask(probe, model.variant)
            except TargetError as error:
                probe.findings.add(argument, None, str(error))
    rounding = probe.findings["residual_rounding"]
    return model.variant if rounding is None else model.variant.replace(residual_rounding=rounding.value)


def _pose(probe: Probe) -> tuple[Array, dict[str, Array]]:
    """x and neutral parameters."""
    rows = np.random.default_rng(18).normal(0.1, 1.0, (probe.step, probe.n))
    return probe.prepare(rows, probe.wide if probe.wide in probe.accepts else probe.accepts[-1])


def _golden(probe: Probe, variant: Variant, x: Array, parameters: Mapping[str, Array], **options: Any) -> Any:
    axes: dict[str, Any] = {"axis": probe.layout.axes, "feature_axis": probe.layout.feature_axes}
    return rms_norm(x, parameters.get("scale"), parameters.get("bias"), variant=variant, **axes, **options)


def _mask(probe: Probe, variant: Variant) -> None:
    x, parameters = _pose(probe)
    layout, count = probe.layout, probe.step
    rows = layout.to_rows(np.random.default_rng(19).random(x.shape) < 0.6, count).copy()
    rows[2] = False
    mask = layout.to_x(rows)

    def agrees(y: Array, want: Array) -> bool:
        """At the elements that count."""
        a, b = (np.where(rows, layout.to_rows(part.astype(np.float64), count), 0.0) for part in (y, want))
        return close(a, b, FORMULA)

    y = probe.target.forward(x, **parameters, mask=mask)
    if agrees(y, _golden(probe, variant, x, parameters)):
        probe.findings.add("mask", "ignored", "y of the elements that count is the same without the mask")
        probe.findings.defect("the mask is ignored")
        return
    if not agrees(y, _golden(probe, variant, x, parameters, mask=mask)):
        probe.findings.add("mask", "otherwise", "y is not that of a mean over the elements that count")
        return
    if probe.target.differentiable:
        rows[2] = True  # a row with nothing counted has a finding of its own
        mask = layout.to_x(rows)
        arrays = {"x": np.where(mask, x, np.nan).astype(x.dtype), **parameters, "mask": mask}
        dscale = probe.target.all_gradients(np.where(mask, 1.0, 0.0).astype(x.dtype), **arrays).get("scale")
        reached = dscale is not None and bool(np.isnan(dscale.astype(np.float64)).any())
        probe.findings.add(
            "nan_under_mask",
            "reaches the gradient" if reached else "kept out",
            f"dscale is {'NaN' if reached else 'finite'} with NaN under the mask",
        )
    probe.findings.add("mask", "counts", "a mean over the elements that count")
    empty = layout.to_rows(y.astype(np.float64), count)[2]
    content = "0" if np.all(empty == 0) else "NaN" if np.isnan(empty).all() else "not 0"
    probe.findings.add("empty_row", content, "y of a row with nothing counted")


def _residual(probe: Probe, variant: Variant) -> None:
    x, parameters = _pose(probe)
    residual = probe.layout.to_x(np.random.default_rng(20).normal(size=(probe.step, probe.n))).astype(x.dtype)
    y = probe.target.forward(x, **parameters, residual=residual).astype(np.float64)
    if close(y, _golden(probe, variant, x + residual, parameters).astype(np.float64), FORMULA):
        probe.findings.add("residual", "added", "y is that of x + residual")
        _rounded_sum(probe, variant)
    elif close(y, _golden(probe, variant, x, parameters).astype(np.float64), FORMULA):
        probe.findings.add("residual", "ignored", "y is the same without it")
        probe.findings.defect("the residual is not added")
    else:
        probe.findings.add("residual", "otherwise", "y is not that of x + residual")


def _rounded_sum(probe: Probe, variant: Variant) -> None:
    """Where the sum is rounded, and the normalised row, which shows where x and the residual have 16 bits."""
    random = np.random.default_rng(25)
    gain: dict[str, Any] = {"scale": probe.parameter("scale", random, 0.5, 2.0)} if probe.takes("scale") else {}
    own = variant.rounding
    for dtype in (name for name in ("bfloat16", "float16") if name in probe.accepts):
        x, parameters = probe.prepare(random.normal(0.1, 1.0, (probe.step, probe.n)), dtype, **gain)
        residual = probe.layout.to_x(random.normal(size=(probe.step, probe.n))).astype(x.dtype)
        y = probe.target.forward(x, **parameters, residual=residual)
        if (second := probe.target.second) is not None:
            want = add(x, residual, x.dtype.name)
            alike = second.shape == want.shape and second.dtype == want.dtype and np.array_equal(second, want)
            evidence = f"the second result, {second.dtype.name}, beside x + residual rounded once"
            probe.findings.add("returned_sum", "rounded" if alike else "otherwise", evidence)
        shares = {}
        for order, rounding in product(_ROUNDED, [own, *(name for name in _ROUNDINGS if name != own)]):
            trial = variant.replace(residual_rounding=order, rounding=rounding)
            want, _ = _golden(probe, trial, x, parameters, residual=residual, out_dtype=y.dtype.name)
            shares[order, rounding] = float(np.mean(want == y))
        order, rounding = max(shares, key=lambda names: shares[names])
        same = f"{100 * shares[order, rounding]:.4g} % of y are its bits in {dtypes.short(dtype)}"
        as_without = max(shares[o, own] for o in _ROUNDED)
        if probe.findings["rounding"] is not None and shares[order, rounding] > SAME_BITS_OF_SUM > as_without:
            probe.findings.add("rounding_with_residual", rounding, f"{_ROUNDINGS[rounding]}: {same}")
            probe.findings.defect(f"with a residual {_ROUNDINGS[rounding]}, without one {_ROUNDINGS[own]}")
        if shares[order, rounding] > SAME_BITS_OF_SUM > min(shares[o, rounding] for o in _ROUNDED):
            probe.findings.add("residual_rounding", order, f"{_ROUNDED[order]}: {same}")
            return
