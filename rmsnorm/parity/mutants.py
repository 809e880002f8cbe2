"""Wrong RMSNorms with one mistake each. The kit must reject all of them, and accept the same code without a mistake.

``candidate`` is an implementation in plain NumPy and float64 that makes the mistake that its caller names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from rmsnorm import dtypes
from rmsnorm.accuracy.rounding import cast, rounded
from rmsnorm.parity.cases import Array, Data
from rmsnorm.parity.judge import Implementation, Outcome


@dataclass(frozen=True)
class Mutant:
    """A mistake, the (case, variant) pairs in which it shows, and the dtypes of x in which it is visible."""

    fault: str
    story: str
    pairs: tuple[tuple[str, str], ...] = (("rows", "standard"),)
    dtypes: tuple[str, ...] = dtypes.FLOATS

    @property
    def implementation(self) -> Implementation:
        return partial(candidate, fault=self.fault)


def candidate(data: Data, fault: str = "") -> Outcome:
    """RMSNorm and its gradients from the equations, with one mistake if it is named."""
    with np.errstate(all="ignore"):
        return _candidate(data, fault)


def _candidate(data: Data, fault: str) -> Outcome:
    call, variant, x = data.call, data.variant, data.x
    if fault == "strides ignored":
        x = np.lib.stride_tricks.as_strided(x, x.shape, np.empty_like(x, order="C", subok=False).strides)
    axes = _shifted(call.axes, x.ndim) if fault == "axis" else call.axes
    axes = call.feature_axes if fault == "groups ignored" else axes
    f, slope = _gate(data, fault)
    on_x, on_y = (f, 1.0) if call.is_gated_before != (fault == "gate on the other side") else (1.0, f)
    whole = x.astype(np.float64)
    if data.residual is not None and fault not in ("residual dropped", "residual after the gate"):
        whole = whole + data.residual.astype(np.float64)
        if (variant.residual_rounding == "before") != (fault == "sum rounded on the other side"):
            whole = rounded(whole, call.sum)
    h = whole * on_x
    if data.residual is not None and fault == "residual after the gate":
        h = h + data.residual.astype(np.float64)
    if fault == "x f(z) rounded":
        h = rounded(h, call.x)
    gain_array, bias_array = data.scale, data.bias
    if fault == "gain and bias swapped":
        gain_array, bias_array = bias_array, gain_array
    shape = [size if axis in call.feature_axes else 1 for axis, size in enumerate(x.shape)]
    g = 1.0 if gain_array is None else gain_array.astype(np.float64).reshape(shape)
    b = -0.0 if bias_array is None else bias_array.astype(np.float64).reshape(shape)
    o = call.offset if gain_array is not None and fault != "offset dropped" else -0.0

    counted = np.broadcast_to(True, x.shape) if data.mask is None or fault == "mask ignored" else data.mask
    unmasked = np.broadcast_to(True, x.shape) if data.mask is None else np.broadcast_to(data.mask, x.shape)
    n = int(np.prod([x.shape[axis] for axis in axes]))
    k = variant.counted(n)
    if fault in ("floor for ceil", "ceil for floor"):
        k = variant.replace(partial_rounding=fault.split()[0]).counted(n)
    if fault == "k in floating point":
        product = n * float(variant.partial or 1)
        k = math.ceil(product) if variant.partial_rounding == "ceil" else int(product)
    order = np.arange(n)[::-1] if fault == "last k for first k" else np.arange(n)
    counted = counted & (order < k).reshape([size if axis in axes else 1 for axis, size in enumerate(x.shape)])

    def total(array: Any) -> Array:
        return np.sum(np.where(counted, array, 0.0), axis=axes, keepdims=True)

    def mean(array: Any) -> Array:
        return total(array) / size

    size = np.maximum(counted.sum(axis=axes, keepdims=True), 1).astype(np.float64)
    empty = ~counted.any(axis=axes, keepdims=True)
    if fault == "n for k":
        size = np.full_like(size, n)
    if fault == "n - 1":
        size = np.maximum(size - 1, 1)
    c = h - mean(h) if variant.statistic == "variance" or fault == "mean in the statistic" else h
    if fault == "mean subtracted":
        h = c = h - mean(h)
    squares = c * c
    if fault == "squares in the dtype of x":
        squares = (rounded(c, call.x).astype(call.x) ** 2).astype(np.float64)
    if fault == "squares in float32":
        squares = (c.astype(np.float32) ** 2).astype(np.float64)
    q = mean(squares)
    if fault == "mean square in bfloat16":
        q = rounded(q, "bfloat16")
    eps = 0.0 if fault == "no eps" else call.eps
    position = variant.eps_position
    if fault == "eps on the other side":
        position = "outside" if position == "inside" else "inside"
    if fault == "eps twice":
        eps = 2 * eps
    root = np.sqrt(q)
    rho = {
        "inside": np.sqrt(q + eps),
        "outside": root + eps,
        "clamp": np.maximum(root, eps / np.sqrt(size)),
    }[position]
    s = {"inside": rho, "outside": root, "clamp": np.where(root > eps / np.sqrt(size), root, np.inf)}[position]
    inverse = 1 / rho
    if fault == "1/rho in bfloat16":
        inverse = rounded(inverse, "bfloat16")
    inverse = np.where(empty & (fault != "empty rows"), 0.0, inverse)

    normalised = np.where(empty & (fault != "empty rows"), 0.0, h * inverse)
    if fault.startswith("clipped at"):
        normalised = np.clip(normalised, -float(fault.split()[-1]), float(fault.split()[-1]))
    if fault == "row of an outlier doubled":
        normalised = np.where(normalised[..., :1] > 3, 2 * normalised, normalised)
    if fault == "factor beyond two axes" and x.ndim > 2:
        normalised = 1.1 * normalised
    if fault.startswith("rows from"):  # the rows are along all axes but the last
        first, what = int(fault.split()[2]), fault.rpartition(" ")[2]
        rest = {"normalised": h, "computed": 0 * h, "scaled": 1.01 * normalised}[what]
        numbers = np.arange(x.size // x.shape[-1]).reshape((*x.shape[:-1], 1))
        normalised = np.where(numbers < first, normalised, rest)
    if fault == "first index from 300 on scaled" and x.ndim > 1:
        normalised = np.concatenate([normalised[:300], 1.01 * normalised[300:]])
    if fault == "gain dropped from column 20000 on":
        g = np.where(np.arange(x.shape[-1]) < 20000, g, 1.0)
    before = call.norm is not None
    late, b = (b, -0.0) if fault == "bias after the gate" else (-0.0, b)
    ungated = _affine(call, normalised, g, b, o, before=before != (fault == "rounded on the other side"), fault=fault)
    if fault == "y rounded before the gate":
        ungated = rounded(ungated, call.x)
    y = np.where(empty & (fault != "empty rows"), 0.0, ungated * on_y + late)

    v = np.where(unmasked & ~empty, data.dy.astype(np.float64) * (1.0 if fault == "no gate in dx" else on_y), 0.0)
    inside = np.where(unmasked, normalised, 0.0) if fault != "NaN under the mask" else normalised
    u = v if fault == "gain dropped from dx" else v * (o + g)
    direction = np.where(counted, np.where(s == 0, 0.0, c * inverse / np.where(s == 0, 1.0, s)), 0.0)
    along = np.sum(u * inside, axis=axes, keepdims=True) / size
    if fault == "no second term in dx":
        along = 0.0
    along_h = np.where(np.isfinite(s), direction, 0.0) * along
    if fault == "eps forgotten in dx":
        along_h = np.where(counted & (q > 0), c * inverse / np.where(q > 0, q * inverse, 1.0) * along, 0.0)
    dx = np.where(unmasked & ~empty, u * inverse - along_h, 0.0)
    dgate = (dx * whole if call.is_gated_before else data.dy.astype(np.float64) * ungated) * slope
    dgate = dgate if fault == "NaN under the mask" else np.where(unmasked & ~empty, dgate, 0.0)
    dx = dx if fault == "no gate in dx" else np.where(unmasked, dx * on_x, 0.0)
    if data.dh is not None and fault != "gradient of the residual branch dropped":
        dx = dx + data.dh.astype(np.float64)
    da, dg, db = (np.zeros(()) if t is None else t.astype(np.float64) for t in data.tangents)
    da, dg, db = (
        np.where(unmasked, da * on_x, 0.0),
        dg.reshape(shape) if dg.ndim else dg,
        db.reshape(shape) if db.ndim else db,
    )
    jvp = da * inverse - inside * np.sum(np.where(np.isfinite(s), direction, 0.0) * da, axis=axes, keepdims=True) / size
    jvp = np.where(unmasked & ~empty, (jvp * (o + g) + inside * dg + db) * on_y, 0.0)

    over = call.shared_axes
    result = "float32" if fault == "float32 result" else call.result
    results: dict[str, Array] = {
        "y": cast(y, result),
        "inverse_rms": cast(inverse, call.inverse_rms),
        "dx": cast(dx, x.dtype.name),
        "jvp": cast(jvp, call.result),
    }
    if data.scale is not None:
        terms = v if fault == "dscale of dbias" else v * (h if fault == "dscale of x" else inside)
        dscale = np.sum(terms, axis=over)
        if fault == "dscale summed in the dtype of x":  # one row after the other
            dscale = np.add.reduce(cast(terms, x.dtype.name), axis=0).astype(np.float64)
        results["dscale"] = cast(np.zeros_like(dscale) if fault == "no dscale" else dscale, data.scale.dtype.name)
    if data.bias is not None:
        results["dbias"] = cast(np.sum(v, axis=over), data.bias.dtype.name)
    if data.residual is not None:
        results["dresidual"] = cast(dx, data.residual.dtype.name)
    if data.gate is not None:
        results["dgate"] = cast(np.zeros_like(dgate) if fault == "no dgate" else dgate, data.gate.dtype.name)
    return Outcome({name: [value] for name, value in results.items()}, ("x",) if fault == "writes x" else ())


def _gate(data: Data, fault: str) -> tuple[Any, Any]:
    """f(z) and its derivative; 1 and 0 without a gate."""
    if data.gate is None or fault == "gate forgotten":
        return 1.0, 0.0
    z = data.gate.astype(np.float64)
    if fault == "z cut off":
        z = np.clip(z, -10, 10)
    s, rest = 1 / (1 + np.exp(-z)), 1 / (1 + np.exp(z))
    silu = (data.variant.gate_function == "silu") != (fault == "another function of the gate")
    f, slope = (z * s, s * (1 + z * rest)) if silu else (s, s * rest)
    if fault == "f(z) rounded":
        f = rounded(f, data.call.x)
    return f, {"f for f' in dgate": f, "s(z) for f' in dgate": s}.get(fault, slope)


def _affine(call: Any, normalised: Array, g: Any, b: Any, o: float, *, before: bool, fault: str) -> Array:
    if fault == "gain dropped":
        g = 1.0
    if fault == "bias dropped":
        b = -0.0
    if not before:
        return normalised * (o + g) + b
    first = rounded(normalised, call.norm or call.x)
    return rounded(rounded(first * rounded(o + np.asarray(g), call.product), call.product) + b, call.product)


def _shifted(axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return tuple((axis + 1) % rank for axis in axes)


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
    Mutant("mean in the statistic", "the variance in the denominator, as rms_scaling has it"),
    Mutant("n - 1", "the unbiased estimate", (("rows", "standard"), ("vector", "standard"))),
    Mutant("n for k", "the partial sum divided by all of n", (("partial 0.3", "paper"),)),
    Mutant("floor for ceil", "k rounded down", (("partial 0.3", "paper"), ("partial 0.001", "paper"))),
    Mutant("ceil for floor", "k rounded up", (("partial 0.3", "zhang_tf"),), ("float16", "float32", "float64")),
    Mutant("k in floating point", "ceil(100 * 0.07) is 8", (("partial 0.07", "paper"),)),
    Mutant("k in floating point", "int(100 * 0.29) is 28", (("partial 0.29", "zhang_tf"),), _WIDE),
    Mutant("last k for first k", "the statistic of the last elements", (("partial 0.3", "paper"),)),
    Mutant("1/rho in bfloat16", "the inverse RMS kept in 16 bits"),
    Mutant("mean square in bfloat16", "the statistic kept in 16 bits"),
    Mutant("squares in the dtype of x", "squared before the cast to float32", dtypes=dtypes.HALF),
    Mutant("squares in float32", "squares overflow", (("huge", "standard"), ("huge", "llama")), _SPREAD),
    Mutant("squares in float32", "squares underflow", (("tiny", "paper"),), _SPREAD),
    Mutant("axis", "first axis for last", (("rows", "standard"), ("middle axis", "keras"))),
    Mutant("mask ignored", "masked elements counted",
           (("mask", "standard"), ("gate, mask", "llama"), ("gate of x, masked sum", "llama"))),
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
