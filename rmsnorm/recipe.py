"""RMSNorm and its gradients in operations that every array library has: the one text for all frameworks.

    y = h / rho * (o + g) + b        dx = R^T u = (u - c <u, h / rho> / (k s)) / rho,    u = (o + g) dy

It computes wherever no kernel does. ``ops`` is what a framework has of NumPy, by the same names, and

    name_of(a)              the name of its dtype
    cast(a, name)           a in the dtype of that name
    rounded(a, name)        a with the digits of that dtype, in its own dtype; the identity to every derivative
    constant(a)             a, which has no derivative
    sum, mean, max(a, axes) over these axes, which are kept
    over(a, axes)           the sum over these axes, which are not kept
    index(a, entries)       a[entries], each a full slice or None
    arange(n, like)         0 to n - 1 on the device of another array
    shape(a)                its sizes; one that a graph does not know yet is an array
    counted(variant, n)     ``Variant.counted`` of such a size
    silu(z)                 z sigmoid(z)
    reciprocal(a)           1 / a
    mean_square, root       those of this module, or others that the framework needs in their place
    is_spread               whether a row is spread over several devices, so that ``sum`` is that of all

Arithmetic is float32, or float64 if an array is. Source: Zhang & Sennrich 2019, section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Call

# Of every arithmetic, from the largest down: a row whose largest element is at least the first number is multiplied by
# the second, a power of two, before it is squared, so that neither a square nor (1 / rho)^3, a factor in derivatives of
# 1 / rho, leaves the range.
_POWERS: Final = {
    "float32": ((2.0**40, 2.0**-80), (2.0**-32, 1.0), (0.0, 2.0**86)),
    "float64": ((2.0**300, 2.0**-640), (2.0**-300, 1.0), (2.0**-600, 2.0**600), (0.0, 2.0**980)),
}
# Where rho is never below the first number, one power of two serves all rows of f32, with which it is never below the
# second.
_LEAST, _LEAST_IN_RANGE = 2.0**-20, 2.0**-42
# Below so much of eps / sqrt(k) a root is clamped: CLAMPED of specification/variants.py, with room for float32.
_CLAMPED: Final = {"float32": 1 - 2.0**-20, "float64": 1 - 2.0**-48}


class Row(NamedTuple):
    """What is known of every row; its normalised axes have size 1.

    Attributes:
        inverse: 1 / rho of the row times ``power``.
        power: a power of two with which no square leaves the range; None for 1.
        slope: rho / s, with drho / dh = h / (k s); None for 1.
        counted: the elements that enter the statistic; None for all.
        k: how many these are.
        empty: whether there are none; None where there always are.
    """

    inverse: Any
    power: Any
    slope: Any
    counted: Any
    k: Any
    empty: Any


def forward(
    ops: Any, call: Call, x: Any, residual: Any, scale: Any, bias: Any, mask: Any, gate: Any
) -> tuple[Any, Any, Row]:
    """y, x + residual (None without one), and what is known of the rows."""
    dtype = _arithmetic(call)
    h, total = _summed(ops, call, x, residual, dtype)
    f = None if gate is None else factor(ops, call, ops.cast(gate, dtype))
    h = h * f if call.is_gated_before else h
    row = _statistic(ops, call, h, mask)
    is_last = f is None or call.is_gated_before
    y = _affine(ops, call, _normalised(h, row), scale, bias, is_last=is_last)
    y = y if is_last else y * f
    if mask is not None:
        y = ops.where(mask, y, ops.constant(y))
    if row.empty is not None:
        y = ops.where(row.empty, 0.0, y)
    return ops.cast(y, call.result_dtype), total, row


def backward(
    ops: Any, call: Call, dy: Any, dh: Any, x: Any, residual: Any, scale: Any, bias: Any, mask: Any, gate: Any,
    row: Row | None = None,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """dx + dh in the dtype of the arithmetic; dscale, dbias and dgate in those of their arrays, or None.

    x may be the sum h itself, without a residual. ``row`` is that of the forward pass, of which inverse, power and
    slope are used. Without it derivatives of these gradients go through 1 / rho, too.
    """
    dtype = _arithmetic(call, ops.name_of(dy))
    h, _ = _summed(ops, call, x, residual, dtype)
    counted, k, empty = _counted(ops, call, h, mask)
    live = None if empty is None else ~empty if mask is None else mask & ~empty
    h = _only(ops, mask, h)  # else a NaN under the mask would be in second derivatives
    before, f, slope = call.is_gated_before, None, None
    if gate is not None:
        f, slope = _factor_and_slope(ops, call, _only(ops, live, ops.cast(gate, dtype)))
    normed = h * f if before else h
    if row is None:
        row = _statistic(ops, call, normed, mask)
    row = row._replace(counted=counted, k=k, empty=empty)
    own = _only(ops, live, ops.cast(dy, dtype))
    v = own if f is None or before else _only(ops, live, own * f)
    unit = _only(ops, live, _normalised(normed, row))
    u = v if scale is None else v * _gain(ops, call, scale, dtype)
    inner = _mean(ops, call, u * unit, row)
    inner = inner if row.slope is None else inner * row.slope
    dx = (u - _only(ops, row.counted, unit * inner)) * row.inverse
    dx = _only(ops, live, dx if row.power is None else dx * row.power)
    dgate = None
    if f is not None:
        along = dx * h if before else own * _affine(ops, call, _normalised(normed, row), scale, bias)
        dgate = ops.cast(_only(ops, live, along * slope), ops.name_of(gate))
        dx = _only(ops, live, dx * f) if before else dx
    dscale = None if scale is None else ops.cast(ops.over(v * unit, call.shared_axes), ops.name_of(scale))
    dbias = None if bias is None else ops.cast(ops.over(v, call.shared_axes), ops.name_of(bias))
    return dx if dh is None else dx + ops.cast(dh, dtype), dscale, dbias, dgate


def around(
    ops: Any, call: Call, norm: Callable[..., tuple[Any, Any]], x: Any, residual: Any, scale: Any, bias: Any, gate: Any
) -> tuple[Any, Any]:
    """y and x + residual of a call without a mask, by a ``norm`` that computes ``call.in_rows``, a kernel.

    The gate, and writing out a gain that several elements of a row share, are operations, which the framework
    differentiates. ``norm`` takes x, residual, scale and bias.
    """
    if call.in_rows.feature_axes != call.feature_axes:
        scale, bias = (None if p is None else _written_out(ops, call, p) for p in (scale, bias))
    if call.gate_dtype is None:
        return norm(x, residual, scale, bias)
    f = factor(ops, call, ops.cast(gate, call.gate_dtype))
    if call.is_gated_before:
        h, total = _summed(ops, call, x, residual, call.gate_dtype)
        return norm(h * f, None, scale, bias)[0], total
    y, total = norm(x, residual, scale, bias)
    return ops.cast(y * f, call.result_dtype), total


def narrowed(ops: Any, call: Call, scale: Any) -> Any:
    """The gain, in its dtype, rounded to that of x where the variant says so."""
    return scale if scale is None or call.gain_dtype is None else ops.rounded(scale, call.gain_dtype)


def inverse_rms(ops: Any, call: Call, row: Row) -> Any:
    """1 / rho as the functions return it."""
    return ops.constant(ops.cast(row.inverse if row.power is None else row.inverse * row.power, call.inverse_rms_dtype))


def factor(ops: Any, call: Call, z: Any) -> Any:
    """f(z) of a gate: the sigmoid s(z), or silu, z s(z)."""
    return ops.silu(z) if call.variant.gate_function == "silu" else ops.sigmoid(z)


def _factor_and_slope(ops: Any, call: Call, z: Any) -> tuple[Any, Any]:
    """f(z) and f'(z): s and s (1 - s), or z s and s (1 + z (1 - s)) of silu."""
    s = ops.sigmoid(z)
    return (z * s, s * (1 + z * (1 - s))) if call.variant.gate_function == "silu" else (s, s * (1 - s))


def mean_square(ops: Any, call: Call, c: Any, row: Row, least: float) -> tuple[Any, Any]:
    """The mean of (c unit)^2 over the elements that count, and unit, a power of two: a number, or one a row.

    ``least`` is the least root that counts. Where eps makes it large enough, one number serves all rows of f32: the
    smallest squares that count beside eps are normal numbers then, and with eps = 1e-6 so is the sum of 4096 squares
    of 1e26.
    """
    if call.x_dtype == "float16" and not (call.is_gated_before or call.exact_sum):  # 65504^2 is far inside of float32
        return _mean(ops, call, c * c, row), 1.0
    if ops.name_of(c) == "float32" and least >= _LEAST:
        unit: Any = min(1.0, _LEAST_IN_RANGE / 2.0 ** math.floor(math.log2(least)))
    else:
        largest = ops.maximum(ops.max(abs(ops.constant(c)), call.axes), least)
        unit = ops.ones_like(largest)
        for first, power in reversed(_POWERS[ops.name_of(c)]):
            unit = ops.where(largest >= first, power, unit)
    scaled = c * unit
    return _mean(ops, call, scaled * scaled, row), unit


def root(ops: Any, q: Any) -> Any:
    """The square root, whose slope at 0 is 0."""
    return ops.where(q > 0, ops.sqrt(ops.where(q > 0, q, 1.0)), ops.constant(q))


def _statistic(ops: Any, call: Call, h: Any, mask: Any) -> Row:
    counted, k, empty = _counted(ops, call, h, mask)
    eps, position, dtype = call.eps, call.variant.eps_position, ops.name_of(h)
    row = Row(None, None, None, counted, k, empty)
    most = call.n if isinstance(call.n, int) else 2**40  # of k, if that is not known yet
    # A root of 2^-24 eps still counts beside eps, but one of 2^-12 sqrt(eps) does not under the root with it.
    least = {"inside": eps**0.5, "outside": eps * 2.0**-12, "clamp": eps / max(most, 1) ** 0.5}[position]
    q, unit = ops.mean_square(ops, call, _only(ops, counted, h), row, least)
    q = q if empty is None else ops.where(empty, 1.0, q)
    ratio = None
    if position == "inside":
        inverse = ops.rsqrt(q + eps * unit * unit)
    else:
        root = ops.root(ops, q)
        if position == "outside":
            rho = root + eps * unit
            ratio = ops.where(root > 0, rho / ops.where(root > 0, root, 1.0), 0.0)
        else:
            floor = eps * unit / k**0.5
            above = ops.maximum(root, floor * _CLAMPED[dtype])  # whose slope is that of rho
            rho = above + ops.constant(ops.maximum(floor - above, 0.0))
            ratio = ops.cast(root >= floor * _CLAMPED[dtype], dtype)
        inverse = ops.reciprocal(rho)
    power = None if isinstance(unit, float) else unit
    inverse = inverse * unit if power is None and unit != 1.0 else inverse
    inverse = inverse if empty is None else ops.where(empty, 0.0, inverse)
    return row._replace(inverse=inverse, power=power, slope=ratio)


def _counted(ops: Any, call: Call, h: Any, mask: Any) -> tuple[Any, Any, Any]:
    """Of ``Row``: counted, k and empty."""
    is_partial = call.variant.partial is not None
    if mask is None and call.n and not (is_partial or ops.is_spread):
        return None, call.k, None
    sizes = [size if axis in call.axes else 1 for axis, size in enumerate(ops.shape(h))]
    n, k = call.n, call.k
    if n is None:
        n = math.prod(sizes)
        if mask is None and not is_partial:
            return None, ops.cast(ops.maximum(n, 1), ops.name_of(h)), n < 1
        k = ops.counted(call.variant, n)
    counted = mask
    if is_partial or mask is None:
        first = ops.reshape(ops.arange(n, h) < k, sizes)
        if mask is None and call.n and not ops.is_spread:
            return first, call.k, None
        counted = first if mask is None else first & mask
    k = ops.sum(ops.where(counted, ops.ones_like(h), 0.0), call.axes)
    empty = k < 1  # an operator that every graph has
    return counted, ops.where(empty, 1.0, k), empty


def _normalised(h: Any, row: Row) -> Any:
    return (h if row.power is None else h * row.power) * row.inverse


def _affine(ops: Any, call: Call, y: Any, scale: Any, bias: Any, *, is_last: bool = False) -> Any:
    """y before a gate, rounded where the variant rounds; if it ``is_last``, the cast to the dtype of y does that."""
    dtype, product, is_rounded = ops.name_of(y), call.product_dtype, call.norm_dtype is not None
    is_cast = is_last and call.result_dtype == product
    if is_rounded and not (is_cast and scale is None and bias is None):
        y = ops.rounded(y, call.norm_dtype)
    if scale is not None:
        g = _gain(ops, call, scale, dtype)
        if is_rounded and (call.variant.scale_offset or (call.gain_dtype or ops.name_of(scale)) != product):
            g = ops.rounded(g, product)
        y = y * g
        y = ops.rounded(y, product) if is_rounded and not (is_cast and bias is None) else y
    if bias is not None:
        y = y + _features(ops, call, bias, dtype)
        y = ops.rounded(y, product) if is_rounded and not is_cast else y
    return y


def _gain(ops: Any, call: Call, scale: Any, dtype: str) -> Any:
    """o + g. An o of 0 is not added: it would make +0 of a gain that is -0."""
    g = _features(ops, call, narrowed(ops, call, scale), dtype)
    return call.variant.scale_offset + g if call.variant.scale_offset else g


def _features(ops: Any, call: Call, parameter: Any, dtype: str) -> Any:
    """A parameter in the shape in which it broadcasts against x: the last axes of x do so without an index."""
    axes, values = range(call.feature_axes[0], len(call.shape)), ops.cast(parameter, dtype)
    if call.feature_axes == tuple(axes):
        return values
    return ops.index(values, tuple(slice(None) if axis in call.feature_axes else None for axis in axes))


def _written_out(ops: Any, call: Call, parameter: Any) -> Any:
    """A parameter with a number for each element of a row, in the arithmetic of its dtype."""
    wide = ops.cast(parameter, dtypes.arithmetic(ops.name_of(parameter)))
    first, rank = call.first_of_row, len(call.shape)
    entries = tuple(slice(None) if axis in call.feature_axes else None for axis in range(first, rank))
    return ops.broadcast_to(ops.index(wide, entries), call.shape[first:])


def _summed(ops: Any, call: Call, x: Any, residual: Any, dtype: str) -> tuple[Any, Any]:
    """What is normalised, in the dtype of the arithmetic, and x + residual as it is returned."""
    if residual is None:
        return ops.cast(x, dtype), None
    exact = ops.cast(x, dtype) + ops.cast(residual, dtype)
    return exact if call.exact_sum else ops.rounded(exact, call.sum_dtype), ops.cast(exact, call.sum_dtype)


def _mean(ops: Any, call: Call, values: Any, row: Row) -> Any:
    return ops.mean(values, call.axes) if row.counted is None else ops.sum(values, call.axes) / row.k


def _only(ops: Any, chosen: Any, values: Any) -> Any:
    """The values, and 0 where they are not chosen. None chooses all."""
    return values if chosen is None else ops.where(chosen, values, 0.0)


def _arithmetic(call: Call, *others: str) -> str:
    return (
        "float64"
        if "float64" in (call.x_dtype, call.product_dtype, call.result_dtype, call.gate_dtype, *others)
        else "float32"
    )
