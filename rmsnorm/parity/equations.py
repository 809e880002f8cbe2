"""RMSNorm in plain NumPy and float64, from the equations: the golden in other words, and with one mistake if asked.

It is written apart from the golden because most mistakes lie between two steps, which the golden does not open. NumPy's
row of ``rmsnorm selftest`` is the same but for h / rho and its derivative, which it takes from the derivation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rmsnorm.accuracy.rounding import cast, rounded
from rmsnorm.parity.cases import Array, Data
from rmsnorm.parity.judge import Outcome


class Normalised(NamedTuple):
    """1 / rho and h / rho, and the products R^T u and R t of its derivative.

    The products get h / rho, too, as it was used in y: 0 under the mask.
    """

    inverse: Array
    quotient: Array
    transposed: Callable[[Array, Array], Array]
    product: Callable[[Array, Array], Array]


Normalise = Callable[[Data, Array, Array, Array], Normalised]  # of h, what counts in the statistic, and the mask


def candidate(data: Data, fault: str = "", normalise: Normalise | None = None) -> Outcome:
    """RMSNorm and its gradients, with one mistake if it is named; ``normalise`` takes the place of ``_normalised``."""
    with np.errstate(all="ignore"):
        return _candidate(data, fault, normalise)


def _candidate(data: Data, fault: str, normalise: Normalise | None) -> Outcome:
    call, variant, x = data.call, data.variant, data.x
    what, _, beside = fault.partition(" beside a ")
    fault = what if beside and getattr(data, beside) is not None else "" if beside else fault
    if fault == "strides ignored":
        x = np.lib.stride_tricks.as_strided(x, x.shape, np.empty_like(x, order="C", subok=False).strides)
    axes = tuple((axis + 1) % x.ndim for axis in call.axes) if fault == "axis" else call.axes
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
    empty = ~counted.any(axis=axes, keepdims=True)
    shown = ~empty | (fault == "empty rows")

    norm = normalise(data, h, counted, unmasked) if normalise else _normalised(data, h, counted, axes, fault)
    inverse, normalised = np.where(shown, norm.inverse, 0.0), np.where(shown, norm.quotient, 0.0)
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
    y = np.where(shown, ungated, 0.0) * on_y + np.where(shown, late, -0.0)

    v = np.where(unmasked & ~empty, data.dy.astype(np.float64) * (1.0 if fault == "no gate in dx" else on_y), 0.0)
    inside = np.where(unmasked, normalised, 0.0) if fault != "NaN under the mask" else normalised
    u = v if fault == "gain dropped from dx" else v * (o + g)
    dx = np.where(unmasked & ~empty, norm.transposed(u, inside), 0.0)
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
    moved = norm.product(da, inside) * (o + g) + inside * dg + db
    jvp = np.where(unmasked & ~empty, moved * on_y, 0.0)

    over = call.shared_axes
    result = "float32" if fault == "float32 result" else call.result
    results: dict[str, Array] = {
        "y": cast(y, result),
        "inverse_rms": cast(inverse, call.inverse_rms),
        "dx": cast(dx, x.dtype.name),
        "jvp": cast(jvp, call.result),
    }
    terms = v if fault == "dscale of dbias" else v * (h if fault == "dscale of x" else inside)
    dscale = np.sum(terms, axis=over)
    if fault == "dscale summed in the dtype of x":  # one row after the other
        dscale = np.add.reduce(cast(terms, x.dtype.name), axis=0).astype(np.float64)
    if fault == "no dscale":
        dscale = np.zeros_like(dscale)
    if fault == "no dgate":
        dgate = np.zeros_like(dgate)
    of_others = {"scale": dscale, "bias": np.sum(v, axis=over), "residual": dx, "gate": dgate}
    for name, gradient in of_others.items():
        if (argument := getattr(data, name)) is not None:
            results[f"d{name}"] = cast(gradient, argument.dtype.name)
    return Outcome({name: [value] for name, value in results.items()}, ("x",) if fault == "writes x" else ())


def _normalised(data: Data, h: Array, counted: Array, axes: tuple[int, ...], fault: str) -> Normalised:
    call, position = data.call, data.variant.eps_position

    def mean(array: Any) -> Array:
        return np.asarray(np.sum(np.where(counted, array, 0.0), axis=axes, keepdims=True) / size)

    size = np.maximum(counted.sum(axis=axes, keepdims=True), 1).astype(np.float64)
    if fault == "n for k":
        size = np.full_like(size, np.prod([h.shape[axis] for axis in axes]))
    if fault == "n - 1":
        size = np.maximum(size - 1, 1)
    c = h - mean(h) if data.variant.statistic == "variance" or fault == "mean in the statistic" else h
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
    eps = call.eps * {"no eps": 0.0, "eps twice": 2.0}.get(fault, 1.0)
    if fault == "eps on the other side":
        position = "outside" if position == "inside" else "inside"
    root, floor = np.sqrt(q), eps / np.sqrt(size)
    rho = {"inside": np.sqrt(q + eps), "outside": root + eps, "clamp": np.maximum(root, floor)}[position]
    s = {"inside": rho, "outside": root, "clamp": np.where(root > floor, root, np.inf)}[position]
    inverse = 1 / rho
    if fault == "1/rho in bfloat16":
        inverse = rounded(inverse, "bfloat16")
    direction = np.where(counted & np.isfinite(s) & (s != 0), c * inverse / np.where(s == 0, 1.0, s), 0.0)

    def transposed(u: Array, quotient: Array) -> Array:
        along = np.sum(u * quotient, axis=axes, keepdims=True) / size
        if fault == "no second term in dx":
            return u * inverse
        if fault == "eps forgotten in dx":
            without = np.where(counted & (q > 0), c * inverse / np.where(q > 0, q * inverse, 1.0), 0.0)
            return u * inverse - without * along
        return u * inverse - direction * along

    def product(t: Array, quotient: Array) -> Array:
        return t * inverse - quotient * np.sum(direction * t, axis=axes, keepdims=True) / size

    return Normalised(inverse, h * inverse, transposed, product)


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
