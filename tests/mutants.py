"""Wrong RMSNorms with one mistake each. The kit must reject all of them, and accept the same code without a mistake."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.accuracy.rounding import cast, rounded
from rmsnorm.parity.equations import Change, Steps, candidate
from rmsnorm.parity.judge import Implementation
from rmsnorm.specification import dtypes
from rmsnorm.specification.variants import PartialRounding
from rmsnorm.targets.bridges import NumPy


class WithGradients(NumPy):
    """Arrays of NumPy, with a function of the arguments and dy that returns the gradients by their names."""

    differentiable = True

    def __init__(self, derivatives: Callable[..., Mapping[str, Any]]) -> None:
        super().__init__()
        self.derivatives = derivatives

    def linear(self, function: Any, tensors: Any, leaves: Any) -> Any:
        return function(tensors), lambda cotangents: self.derivatives(tensors, cotangents[0])


class Fault(NamedTuple):
    """A mistake: the steps that it changes, and what ``identify`` must say of it.

    Attributes:
        changes: by the name of the step, what its value becomes.
        said: words of a defect or of a difference to the variant; a finding and words of its answer; or nothing, where
            identify asks for nothing in which it shows.
    """

    changes: Mapping[str, Change]
    said: str | tuple[str, str] = ""


@dataclass(frozen=True)
class Mutant:
    """A mistake, the (case, variant) pairs in which it shows, and the dtypes of x in which it is visible."""

    fault: str
    story: str
    pairs: tuple[tuple[str, str], ...] = (("rows", "standard"),)
    dtypes: tuple[str, ...] = dtypes.FLOATS

    @property
    def implementation(self) -> Implementation:
        return partial(candidate, changes=FAULTS[self.fault].changes)


def _other(one: Any, other: Any) -> Change:
    """The other one of two values."""
    return lambda s, value: other if value == one else one


def _to(value: Any) -> Change:
    return lambda s, right: value


def _beside(option: str, changes: Mapping[str, Change]) -> dict[str, Change]:
    """Changes in calls with an option alone."""

    def only(change: Change) -> Change:
        return lambda s, value: value if getattr(s.data, option) is None else change(s, value)

    return {name: only(change) for name, change in changes.items()}


def _from_row(first: int, wrong: Callable[[Steps], Any]) -> dict[str, Change]:
    """Another h / rho in the rows from one on, which are along all axes but the last."""

    def change(s: Steps, y: Any) -> Any:
        return np.where(np.arange(y.size // y.shape[-1]).reshape((*y.shape[:-1], 1)) < first, y, wrong(s))

    return {"normalised": change}


def _in_floating_point(rounding: Callable[[float], int]) -> Change:
    return lambda s, k: rounding(s.n * float(s.variant.partial or 1))


def _rounded_by(rounding: PartialRounding) -> Change:
    return lambda s, k: s.variant.replace(partial_rounding=rounding).counted(s.n)


def _rows_one_by_one(s: Steps, right: Any) -> Any:
    return np.add.reduce(cast(s.terms, s.x.dtype.name), axis=0).astype(np.float64)


def _as_if_contiguous(s: Steps, x: Any) -> Any:
    return np.lib.stride_tricks.as_strided(x, x.shape, np.empty_like(x, order="C", subok=False).strides)


def _without_eps(s: Steps, right: Any) -> Any:
    direction = np.where(s.counted & (s.q > 0), s.c * s.inverse / np.where(s.q > 0, s.q * s.inverse, 1.0), 0.0)
    return s.u * s.inverse - direction * s.inner(s.u * s.inside) / s.size


_OTHER_EPS: Final = {"position": _other("inside", "outside")}
_NO_GATE: Final = {"f": _to(1.0), "slope": _to(0.0)}
_NO_MASK: Final[dict[str, Change]] = {"counted": lambda s, _: s.first}
_ALL_N: Final[dict[str, Change]] = {"size": lambda s, size: np.full_like(size, s.n)}
_NONE: Final = "kind is 'none', {name} is RMSNorm"

_GATED: Final = "with a gate, y is not what a known function of it gives"

FAULTS: Final = {
    "gain dropped": Fault({"gain": _to(1.0)}, "the gain is not applied"),
    "bias dropped": Fault({"bias": _to(-0.0)}, "the bias is not applied"),
    "gain and bias swapped": Fault(
        {"gain": lambda s, _: s.parameter("bias", 1.0), "bias": lambda s, _: s.parameter("scale", -0.0)}, _NONE),
    "offset dropped": Fault({"offset": _to(-0.0)}, "scale_offset is 0.0, {name} has 1.0"),
    "rounded on the other side": Fault(
        {"norm": lambda s, norm: None if norm else s.call.x_dtype}, "rounding is '{other}', {name} has '{own}'"),
    "eps on the other side": Fault(_OTHER_EPS, "eps_position is '{place}', {name} has '{own_place}'"),
    # identify asks for an option alone, and with a mask for no eps
    "eps on the other side beside a mask": Fault(_beside("mask", _OTHER_EPS)),
    "mask ignored beside a residual": Fault(_beside("residual", _NO_MASK)),
    "gate forgotten beside a mask": Fault(_beside("mask", _NO_GATE)),
    "gate forgotten beside a residual": Fault(_beside("residual", _NO_GATE)),
    "no eps": Fault({"eps": _to(0.0)}, "eps is 0.0, {name} has {eps}"),
    "eps twice": Fault({"eps": lambda s, eps: 2 * eps}, "eps is 2e-06, {name} has 1e-06"),
    "mean subtracted": Fault({"h": lambda s, h: h - s.mean(h)}, "kind is 'layernorm', {name} is RMSNorm"),
    "mean in the statistic": Fault(
        {"c": lambda s, c: c - s.mean(c)}, _NONE),
    "n - 1": Fault({"size": lambda s, n: np.maximum(n - 1, 1)}, "the sum of squares is divided by n - 1 = 47"),
    "n for k": Fault(_ALL_N, "the sum of squares is divided by all 48 elements, of which 15 are summed"),
    "n for the counted": Fault(_ALL_N, "divided by n, not by the number of elements that count"),
    "floor for ceil": Fault({"k": _rounded_by("floor")}, "partial_rounding is 'floor', {name} has 'ceil'"),
    "ceil for floor": Fault({"k": _rounded_by("ceil")}, "partial_rounding is 'ceil', {name} has 'floor'"),
    "ceil in floating point": Fault({"k": _in_floating_point(math.ceil)}, "is computed in floating point"),
    "floor in floating point": Fault({"k": _in_floating_point(math.floor)}, "is computed in floating point"),
    "last k for first k": Fault({"order": lambda s, order: s.n - 1 - order}, _NONE),
    "1/rho in bfloat16": Fault(
        {"inverse": lambda s, inverse: rounded(inverse, "bfloat16")}, "1 / rho is rounded to bfloat16"),
    "mean square in bfloat16": Fault(
        {"q": lambda s, q: rounded(q, "bfloat16")}, "the mean square is rounded to bfloat16"),
    "squares in the dtype of x": Fault(
        {"squares": lambda s, _: (rounded(s.c, s.call.x_dtype).astype(s.call.x_dtype) ** 2).astype(np.float64)},
        "the squares are rounded to bfloat16, before the cast to float32"),
    "squares in float32": Fault(
        {"squares": lambda s, _: (s.c.astype(np.float32) ** 2).astype(np.float64)}),
    "axis": Fault({"axes": lambda s, axes: tuple((axis + 1) % s.x.ndim for axis in axes)}, ("axes", "0 of 2")),
    "mask ignored": Fault(_NO_MASK, "the mask is ignored"),
    "gate forgotten": Fault(_NO_GATE, "the gate is not applied"),
    "NaN under the mask": Fault({"inside": lambda s, _: s.normalised, "dgate": lambda s, _: s.df * s.slope}),
    "empty rows": Fault({"shown": lambda s, shown: np.full_like(shown, True)}),
    "residual dropped": Fault({"input": lambda s, _: s.wide("x")}, "the residual is not added"),
    "residual after the gate": Fault(  # identify passes a gate or a residual, not both
        {"input": lambda s, _: s.wide("x"), "h": lambda s, h: h + s.extra},
        "residual_rounding is 'after'"),
    "gradient of the residual branch dropped": Fault({"dx": lambda s, _: s.dx_of_y}),  # identify asks for y alone
    "sum rounded on the other side": Fault(
        {"is_rounded": lambda s, is_rounded: not is_rounded}, "residual_rounding is '"),
    "no second term in dx": Fault(
        {"transposed": lambda s, _: s.u * s.inverse}, "the gradient for x takes 1 / rho for a constant"),
    "eps forgotten in dx": Fault({"transposed": _without_eps}, "the gradient for x leaves eps out"),
    "gain dropped from dx": Fault({"u": lambda s, _: s.v}, "the gradient for x leaves the gain out"),
    "no dscale": Fault({"dscale": lambda s, dscale: 0 * dscale}, "the gradient for the gain is 0"),
    "dscale of x": Fault(
        {"terms": lambda s, _: s.v * s.h}, "the gradient for the gain is that of x, not of the normalised x"),
    "dscale of dbias": Fault({"terms": lambda s, _: s.v}, "the gradient for the gain is the gradient for the bias"),
    "dscale summed in the dtype of x": Fault({"dscale": _rows_one_by_one}),
    "float32 result": Fault({"result": _to("float32")}, "y is float32 whatever x is"),
    "writes x": Fault({"touched": _to(("x",))}, "it writes to its arguments: x"),
    # identify does not ask for so many axes, rows or columns, for strides, or for an outlier of 60 times the RMS
    "factor beyond two axes": Fault({"normalised": lambda s, y: y if y.ndim < 3 else 1.1 * y}),
    "rows from 8192 on not normalised": Fault(_from_row(8192, lambda s: s.h)),
    "rows from 65535 on not computed": Fault(_from_row(65535, lambda s: 0.0)),
    "rows from 4097 on scaled": Fault(_from_row(4097, lambda s: 1.01 * s.h * s.inverse)),
    "first index from 300 on scaled": Fault({"normalised": lambda s, y: np.concatenate([y[:300], 1.01 * y[300:]])}),
    "gain dropped from column 20000 on": Fault({"gain": lambda s, g: np.where(np.arange(s.n) < 20000, g, 1.0)}),
    "strides ignored": Fault({"x": _as_if_contiguous}),
    "clipped at 60": Fault({"normalised": lambda s, y: np.clip(y, -60, 60)}),
    "clipped at 4.5": Fault({"normalised": lambda s, y: np.clip(y, -4.5, 4.5)}, "x / rho is cut off at 4.5"),
    "row of an outlier doubled": Fault({"normalised": lambda s, y: np.where(y[..., :1] > 3, 2 * y, y)}, _NONE),
    "gate on the other side": Fault({"is_before": lambda s, is_before: not is_before}, "gate_position is '"),
    "another function of the gate": Fault({"function": _other("silu", "sigmoid")}, "gate_function is '"),
    "f(z) rounded": Fault({"f": lambda s, f: rounded(f, s.call.x_dtype)}, "f(gate) is rounded"),
    "y rounded before the gate": Fault(
        {"biased": lambda s, y: rounded(y, s.call.x_dtype)}, "y is rounded before the gate"),
    "x f(z) rounded": Fault({"h": lambda s, h: rounded(h, s.call.x_dtype)}, "x f(gate) is rounded"),
    "z cut off": Fault({"z": lambda s, z: np.clip(z, -10, 10)}, _GATED),
    "bias after the gate": Fault(
        {"y": lambda s, _: s.gained * s.on_y + s.bias}, _GATED),
    "groups ignored": Fault({"axes": lambda s, _: s.call.feature_axes}),  # the target of its case has one group
    "no gate in dx": Fault({"v": lambda s, _: np.where(s.live, s.wide("dy"), 0.0),
                            "dx_of_y": lambda s, _: np.where(s.mask, s.dh, 0.0)},
                           "the gradient for x leaves the gate out"),
    "no dgate": Fault({"dgate": lambda s, dgate: 0 * dgate}, "the gradient for the gate is 0"),
    "f for f' in dgate": Fault({"slope": lambda s, _: s.f}, "(gate) for the derivative of s"),
    "s(z) for f' in dgate": Fault(
        {"slope": lambda s, _: s.sigmoid}, "the gradient for the gate takes sigmoid(gate) for the derivative of silu"),
}  # fmt: skip

_WIDE: Final = ("float32", "float64")
_SPREAD: Final = ("bfloat16", "float32")

MUTANTS: Final = (
    Mutant("gain dropped", "the gain is not applied"),
    Mutant("bias dropped", "the bias is not applied", (("bias", "standard"), ("two axes", "equinox"))),
    Mutant("gain and bias swapped", "bias multiplies, gain is added", (("bias", "standard"),)),
    Mutant("offset dropped", "w instead of 1 + w", (("rows", "gemma"),)),
    Mutant("rounded on the other side", "after the gain instead of before", (("rows", "llama"),), dtypes.HALF),
    Mutant("rounded on the other side", "before the gain instead of after", (("rows", "standard"),), dtypes.HALF),
    Mutant("eps on the other side", "sqrt(q) + eps", (("rows", "standard"), ("eps 0.1", "standard"))),
    Mutant("eps on the other side", "sqrt(q + eps)", (("eps 0.1", "zhang_torch"),)),
    Mutant("no eps", "eps left out", (("rows", "standard"), ("rows", "nematus"))),
    Mutant("eps twice", "another eps", (("rows", "standard"),)),
    Mutant("mean subtracted", "LayerNorm"),
    Mutant("mean in the statistic", "the variance in the denominator, as in rms_scaling of Keras"),
    Mutant("n - 1", "the unbiased estimate", (("rows", "standard"), ("vector", "standard"))),
    Mutant("n for k", "the partial sum divided by all of n", (("partial 0.3", "paper"),)),
    Mutant("floor for ceil", "k rounded down", (("partial 0.3", "paper"), ("partial 0.001", "paper"))),
    Mutant("ceil for floor", "k rounded up", (("partial 0.3", "zhang_tf"),), ("float16", "float32", "float64")),
    Mutant("ceil in floating point", "ceil(100 * 0.07) is 8", (("partial 0.07", "paper"),)),
    Mutant("floor in floating point", "int(100 * 0.29) is 28", (("partial 0.29", "zhang_tf"),), _WIDE),
    Mutant("last k for first k", "the statistic of the last elements", (("partial 0.3", "paper"),)),
    Mutant("1/rho in bfloat16", "the inverse RMS kept in 16 bits"),
    Mutant("mean square in bfloat16", "the statistic kept in 16 bits"),
    Mutant("squares in the dtype of x", "squared before the cast to float32", dtypes=dtypes.HALF),
    Mutant("squares in float32", "squares overflow", (("huge", "standard"), ("huge", "llama")), _SPREAD),
    Mutant("squares in float32", "squares underflow", (("tiny", "paper"),), _SPREAD),
    Mutant("axis", "first axis for last", (("rows", "standard"), ("middle axis", "keras"))),
    Mutant("mask ignored", "masked elements counted",
           (("mask", "standard"), ("gate, mask", "llama"), ("gate of x, masked sum", "llama"))),
    Mutant("n for the counted", "the sum over the mask divided by all of n", (("mask", "standard"),)),
    Mutant("eps on the other side beside a mask", "sqrt(q) + eps where there is one", (("mask", "standard"),)),
    Mutant("mask ignored beside a residual", "two options, of which one is applied", (("mask, residual", "standard"),)),
    Mutant("gate forgotten beside a mask", "two options, of which one is applied", (("gate, mask", "standard"),)),
    Mutant("gate forgotten beside a residual", "y alone", (("gate, residual", "standard"),)),
    Mutant("NaN under the mask", "NaN reaches the gain's gradient", (("mask", "standard"),)),
    Mutant("NaN under the mask", "NaN reaches the gate's gradient", (("gate, mask", "standard"),)),
    Mutant("empty rows", "a row with nothing counted is not 0", (("mask", "standard"),)),
    Mutant("residual dropped", "x alone is normalised", (("residual", "standard"), ("gate, residual", "standard"))),
    Mutant("residual after the gate", "x f(z) + residual", (("gate of x, masked sum", "llama"),)),
    Mutant("gradient of the residual branch dropped", "dh does not reach dx",
           (("residual", "llama"), ("gate, residual", "apex"), ("gate of x, masked sum", "llama"))),
    Mutant("sum rounded on the other side", "before the norm", (("residual, exact sum", "llama"),), dtypes.HALF),
    Mutant("sum rounded on the other side", "after the norm", (("residual", "llama"),), dtypes.HALF),
    Mutant("no second term in dx", "1/rho taken for a constant"),
    Mutant("eps forgotten in dx", "the gradient of another eps", (("rows", "standard"), ("width 1", "standard"))),
    Mutant("gain dropped from dx", "u = v"),
    Mutant("no dscale", "no gradient for the gain"),
    Mutant("dscale of x", "x in position of the normalised x"),
    Mutant("dscale of dbias", "the gain's gradient is the bias's"),
    Mutant("float32 result", "the result is not cast back", dtypes=("float16", "bfloat16", "float64")),
    Mutant("writes x", "the input is overwritten"),
    Mutant("factor beyond two axes", "x of three axes", (("odd", "standard"),)),
    Mutant("factor beyond two axes", "x of four axes", (("constant", "standard"),)),
    Mutant("factor beyond two axes", "x of five axes", (("tall", "standard"),)),
    Mutant("rows from 8192 on not normalised", "as they are", (("many rows", "standard"),)),
    Mutant("rows from 8192 on not normalised", "of 3 axes", (("long sequences", "standard"),)),
    Mutant("rows from 65535 on not computed", "more than the blocks of a grid", (("many rows", "standard"),)),
    Mutant("rows from 4097 on scaled", "by 1.01, along the second axis", (("long sequences", "standard"),)),
    Mutant("first index from 300 on scaled", "by 1.01, of two axes", (("many, 3 axes", "standard"),)),
    Mutant("gain dropped from column 20000 on", "more than a block has", (("very wide", "standard"),)),
    Mutant("dscale summed in the dtype of x", "terms of one sign", (("one sign", "standard"),), dtypes.HALF),
    Mutant("dscale summed in the dtype of x", "of a wide gain, too", (("one sign", "llama"),), dtypes.HALF),
    Mutant("strides ignored", "x read as if it were contiguous", (("strided", "standard"), ("strided", "llama"))),
    Mutant("clipped at 4.5", "outliers cut off"),
    Mutant("clipped at 60", "large outliers cut off", (("wide", "standard"),)),
    Mutant("row of an outlier doubled", "a branch for rows that start with an outlier"),
    Mutant("gate forgotten", "y alone", (("gate", "standard"), ("sigmoid gate", "standard"))),
    Mutant("gate forgotten", "the norm of x alone", (("gate of x", "llama"), ("sigmoid gate of x", "standard"))),
    Mutant("gate on the other side", "of x for of y", (("gate", "standard"), ("sigmoid gate", "standard"))),
    Mutant("gate on the other side", "of y for of x", (("gate of x", "llama"), ("sigmoid gate of x", "standard"))),
    Mutant("another function of the gate", "sigmoid for SiLU", (("gate", "apex"), ("gate of x", "llama"))),
    Mutant("another function of the gate", "SiLU for sigmoid", (("sigmoid gate", "standard"),)),
    Mutant("f(z) rounded", "SiLU in 16 bits", (("gate", "standard"), ("gate of x", "llama")), dtypes.HALF),
    Mutant("y rounded before the gate", "two roundings", (("gate", "standard"),), dtypes.HALF),
    Mutant("x f(z) rounded", "to the dtype of x", (("gate of x", "llama"),), dtypes.HALF),
    Mutant("z cut off", "exponentials are feared", (("gate", "standard"), ("gate of x", "llama"))),
    Mutant("bias after the gate", "y f(z) + b", (("sigmoid gate", "standard"),)),
    Mutant("groups ignored", "one statistic for all groups", (("groups", "standard"),)),
    Mutant("groups ignored", "one statistic of x f(z) for all groups", (("gate of x", "llama"),)),
    Mutant("no gate in dx", "dy for dy f(z)", (("gate", "standard"),)),
    Mutant("no gate in dx", "dh for dh f(z)", (("gate of x", "llama"),)),
    Mutant("no dgate", "no gradient for the gate", (("gate", "standard"), ("gate of x", "llama"))),
    Mutant("f for f' in dgate", "the gate itself", (("gate", "standard"), ("sigmoid gate of x", "standard"))),
    Mutant("s(z) for f' in dgate", "z is a constant in z s(z)", (("gate", "standard"), ("gate of x", "llama"))),
)  # fmt: skip
