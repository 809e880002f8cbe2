"""The sizes of the terms that add up to each result: the natural unit of its rounding error.

A result is a sum; its error in any sensible arithmetic is a few unit roundoffs of the sum of the terms' absolute
values, however much of them cancels. LAPACK's tests measure in the same unit. The sums are written apart from the
golden, whose differences they measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rmsnorm.numpy_impl.arithmetic import add
from rmsnorm.numpy_impl.double_double import Array
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Axis, Call, Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Variant, derive


def term_sizes(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    dy: Array,
    tangents: Sequence[Array | None],
    dh: Array | None = None,
    variant: str | Variant = "standard",
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    mask: Array | None = None,
    residual: Array | None = None,
    gate: Array | None = None,
    out_dtype: str | None = None,
    automatic: bool = False,
) -> dict[str, Array]:
    """Sums of the absolute values of the terms of every result.

        y: |x^ (o + g)| + |b|        inverse_rms: 1 / rho
        dx: |u| / rho + m |x^| sum_i |u_i x^_i| / (k s) + |dh|
        dscale: sum over rows of |dy x^|        dbias: sum over rows of |dy|

    and likewise for the derivative along the tangents, ``jvp``. With a gate z, x^ is that of x f(z) or these are
    multiplied by |f|, as the variant says; and

        dgate: |dy y f'(z)|, or |dh x f'(z)| with dh the gradient for x f(z)

    of the terms of y and dh, where f' = s(z) (1 + z (1 - s(z))), or s(z) (1 - s(z)) for a sigmoid, has the terms
    s (1 + |z| (1 + s)), or s (1 + s).

    Args:
        x, scale, bias and options: as for rms_norm.
        automatic: whether another program rounds to a format before the gain, in its derivatives too: there a product
            below the format's least normal number errs as that number does.
        dy, dh: gradients of the loss with respect to y and to x + residual.
        tangents: (dx, dscale, dbias).

    Returns:
        float64 arrays by the name of the quantity, shaped as it.

    Raises:
        TypeError, ValueError: as rms_norm.

    Source: the same measure as LAPACK Working Note 41.

    Example:
        >>> import numpy as np
        >>> one = np.ones(2)
        >>> term_sizes(one, one, dy=one, tangents=(one, None, None), variant="paper")["dx"]
        array([2., 2.])
    """
    arrays = {"x": x, "scale": scale, "bias": bias, "residual": residual, "gate": gate}
    specs: dict[str, Any] = {name: Spec(a.shape, a.dtype.name) for name, a in arrays.items() if a is not None}
    options: dict[str, Any] = {"axis": axis, "feature_axis": feature_axis, "out_dtype": out_dtype}
    call = resolve("term_sizes", variant=derive("term_sizes", variant, None, None), **specs, **options)
    least = dtypes.smallest_normal(call.norm_dtype) if automatic and call.norm_dtype is not None else 0.0
    with np.errstate(all="ignore"):
        h = add(x, residual, call.x_dtype)
        if gate is None:
            return _term_sizes(call, h, scale, bias, dy, tangents, dh, mask, least)
        return _gated(call, h.astype(np.float64), scale, bias, dy, tangents, dh, mask, gate.astype(np.float64), least)


def _gated(
    call: Call, h: Array, scale: Array | None, bias: Array | None, dy: Array, tangents: Sequence[Array | None],
    dh: Array | None, mask: Array | None, z: Array, least: float,
) -> dict[str, Array]:  # fmt: skip
    def unmasked(array: Array) -> Array:
        return np.where(live, np.abs(array), 0.0)

    counted, live = _counted(call, mask)
    is_shown = counted.any(axis=call.axes, keepdims=True)
    h, z = (np.where(is_shown, array, 0.0) for array in (h, z))  # in other rows y is 0, also where they are NaN
    s = np.exp(np.minimum(z, 0)) / (1 + np.exp(-np.abs(z)))
    f, slope = (z * s, s * (1 + np.abs(z) * (1 + s))) if call.variant.gate_function == "silu" else (s, s * (1 + s))
    if call.is_gated_before:
        moved = [None if tangents[0] is None else tangents[0] * f, *tangents[1:]]
        sizes = _term_sizes(call, h * f, scale, bias, dy, moved, None, mask, least)
        dx = unmasked(sizes["dx"] * f) + (0.0 if dh is None else np.abs(dh.astype(np.float64)))
        return sizes | {"dx": dx, "dresidual": dx, "dgate": unmasked(_normal(sizes["dx"], least) * h * slope)}
    sizes = _term_sizes(call, h, scale, bias, _normal(dy * f, least), tangents, dh, mask, least)
    gated = {"y": sizes["y"] * np.abs(f), "jvp": unmasked(sizes["jvp"] * f)}
    return sizes | gated | {"dgate": unmasked(dy.astype(np.float64) * sizes["y"] * slope)}


def _counted(call: Call, mask: Array | None) -> tuple[Array, Array]:
    """Which elements enter the statistic, and which have derivatives."""
    unmasked = np.broadcast_to(True if mask is None else mask, call.shape)
    first = (np.arange(call.n) < call.k).reshape([s if a in call.axes else 1 for a, s in enumerate(call.shape)])
    counted = unmasked & first
    return counted, unmasked & counted.any(axis=call.axes, keepdims=True)


def terms_of_dscale(products: Array, v: Array, least: float) -> Array:
    """The size of each |dy x^|, where x^ and the product are rounded to a format whose least normal number this is."""
    return _normal(np.where(products == 0, 0.0, np.maximum(products, v * least)), least)


def _normal(values: Array, least: float) -> Array:
    """|values|, but for 0 at least this."""
    return np.where(values == 0, 0.0, np.maximum(np.abs(values), least))


def _term_sizes(
    call: Call,
    h: Array,
    scale: Array | None,
    bias: Array | None,
    dy: Array,
    tangents: Sequence[Array | None],
    dh: Array | None,
    mask: Array | None,
    least: float,
) -> dict[str, Array]:
    def wide(array: Array) -> Array:
        return np.abs(array.astype(np.float64))

    def parameter(array: Array | None) -> Array:
        return np.zeros(()) if array is None else wide(array).reshape(call.feature_shape)

    def mean(array: Array) -> Array:
        return np.sum(array, axis=call.axes, keepdims=True) / k

    def over_rows(array: Array) -> Array:
        return np.sum(array, axis=call.shared_axes)

    counted, live = _counted(call, mask)
    k = np.maximum(counted.sum(axis=call.axes, keepdims=True), 1)
    h = h.astype(np.float64)
    power = np.max(np.abs(h), axis=call.axes, keepdims=True, initial=max(call.eps, 2.0**-1000), where=counted)
    power = np.where(np.isfinite(power), 2.0 ** np.floor(np.log2(power)), 1.0)
    c = np.where(counted, h / power, 0.0)
    root = np.sqrt(mean(c**2))
    eps, position = call.eps, call.variant.eps_position
    rho = {
        "inside": np.hypot(root, np.sqrt(eps) / power),
        "outside": root + eps / power,
        "clamp": np.maximum(root, eps / np.sqrt(k) / power),
    }[position]
    has_counted = counted.any(axis=call.axes, keepdims=True)
    rho = np.where(has_counted, rho, 1.0)  # with nothing counted and eps = 0 there are no terms, not 0 / 0
    s = np.where(root == 0, np.inf, rho if position == "inside" else root)  # without a direction there is no slope

    normalised = np.where(has_counted, wide(h / power) / rho, 0.0)
    direction = np.where(counted, np.abs(c) / rho, 0.0)
    inner = np.where(live, normalised, 0.0)
    v = np.where(live, wide(dy), 0.0)
    gain = np.ones(()) if scale is None else np.abs(call.variant.scale_offset) + parameter(scale)
    ratio, unit = rho / s, np.frexp(power)[1] - 1
    # dx may be in range where products of what makes it are not: c, u and h go without their powers of two
    (of_v, v_exponent), (of_gain, gain_exponent), (of_h, h_exponent) = map(np.frexp, (v, gain, np.abs(h)))
    of_c, c_exponent = np.where(counted, of_h, 0.0), h_exponent
    size = np.max(c_exponent, axis=call.axes, keepdims=True, initial=-10000, where=of_c > 0)
    if position != "inside":
        of_c, c_exponent = of_c / np.sqrt(mean(np.ldexp(of_c, c_exponent - size) ** 2)), c_exponent - size + unit
    of_c = np.where(of_c > 0, of_c / (rho if position == "inside" else 1), 0.0)
    u, exponent = of_v * of_gain, v_exponent + gain_exponent
    if least and scale is not None:
        is_subnormal = (u > 0) & (np.ldexp(u, exponent) < least)
        u, exponent = (np.where(is_subnormal, *pair) for pair in zip(np.frexp(least), (u, exponent), strict=True))
    inner_terms, top = np.where(u > 0, u * of_h, 0.0), exponent + h_exponent
    largest = np.max(top, axis=call.axes, keepdims=True, initial=-10000, where=inner_terms > 0)
    along = np.where(of_c > 0, of_c * mean(np.ldexp(inner_terms, top - largest)), 0.0) / rho**2
    dx = np.ldexp(u / rho, exponent - unit) + np.ldexp(along, largest + c_exponent - 3 * unit)
    tangent = np.where(live, wide(tangents[0]) / power, 0.0) if tangents[0] is not None else np.zeros(h.shape)
    jvp = (tangent + inner * ratio * mean(direction * tangent)) / rho * gain
    jvp = jvp + inner * parameter(tangents[1]) + parameter(tangents[2])
    dx = dx + (0.0 if dh is None else wide(dh))
    products = np.where(v > 0, np.ldexp(of_v * of_h / rho, v_exponent + h_exponent - unit), 0.0)
    return {
        "y": normalised * gain + parameter(bias),
        "inverse_rms": np.where(has_counted, 1.0 / rho / power, 0.0),
        "dx": dx,
        "dresidual": dx,
        "dscale": over_rows(terms_of_dscale(products, v, least)),
        "dbias": over_rows(v),
        "jvp": np.broadcast_to(jvp, h.shape),
    }
