"""The arithmetic of RMSNorm on JAX arrays.

All of it is float64, so that results in 16 and 32 bits are correctly rounded and no square of theirs leaves the range.
Where x or y is float64 itself, the statistic is scaled by a power of two and what each operation of the forward pass
rounds off is carried along. To be called with x64 enabled. JAX differentiates ``tangent`` and nothing else here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from rmsnorm.call import Call
from rmsnorm.flax_impl.rounding import (
    cast,
    cut,
    double,
    finite,
    product_error,
    sum_error,
    sum_of_squares,
)


class Across(NamedTuple):
    """A named axis over which rows are spread: sums of a row go over it too."""

    axis_name: Any
    groups: tuple[tuple[int, ...], ...] | None = None


class Statistic(NamedTuple):
    """Of every row, the normalised axes kept with size 1; rho belongs to a * inverse_power."""

    counted: jax.Array | None  # elements that enter the statistic, None for all
    k: Any
    empty: jax.Array | None
    inverse_power: Any
    rho: jax.Array
    rho_error: Any
    inverse_rms: jax.Array


def statistic(call: Call, a: jax.Array, mask: jax.Array | None, across: Across | None = None) -> Statistic:
    exact = _is_exact(call)
    counted, k, empty = _counted(call, a, mask, across)
    a = double(a) if counted is None else jnp.where(counted, double(a), 0.0)
    inverse_power: Any = _inverse_power(call, a, k, across) if exact else 1.0
    a = a * inverse_power
    c = _centred(call, a, counted, k, across)
    q_error: Any = 0.0
    if exact:
        lost: Any = 0.0
        if call.variant.statistic == "variance":  # the mean may be slightly off: q feels the square of it alone
            mean = cut(_sum(call, a, across) / k)
            lost = sum_error(a, -mean, a - mean)
            c = a - mean if counted is None else jnp.where(counted, a - mean, 0.0)
        total, total_error = sum_of_squares(c, call.axes)
        total_error = total_error + 2 * _sum(call, c * lost)
        total, total_error = _across(total, across), _across(total_error, across)
        q = cut(total / k)
        q_error = finite((total_error - product_error(q, k, total)) / k)
    else:
        q = _sum(call, c * c, across) / k
    inside, outside, floor = _eps(call, k, inverse_power)
    floor_error: Any = 0.0
    if exact and call.variant.eps_position == "clamp":
        root, floor = jnp.sqrt(k), cut(floor)
        lost = -product_error(root, root, k) / (2 * root)
        floor_error = (-product_error(floor, root, call.eps * inverse_power) - floor * lost) / root
    radicand = q + inside
    root = cut(jnp.sqrt(radicand)) if exact else jnp.sqrt(radicand)
    rho = jnp.maximum(root + outside, floor)
    rho_error: Any = 0.0
    if exact:
        lost = sum_error(q, inside, radicand) + q_error - product_error(root, root, radicand)
        rho_error = finite(lost / (2 * root)) + sum_error(root, outside, rho)
        rho_error = jnp.where(rho > floor, rho_error, floor_error)
    reciprocal = 1 / rho
    if exact:
        reciprocal = cut(reciprocal)
        lost = (-product_error(reciprocal, rho, 1.0) - reciprocal * rho_error) / rho
        reciprocal = reciprocal + finite(lost)
    inverse_rms = reciprocal * inverse_power
    if empty is not None:
        inverse_rms = jnp.where(empty, 0.0, inverse_rms)
    return Statistic(counted, k, empty, inverse_power, rho, rho_error, inverse_rms)


def forward(
    call: Call,
    a: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    mask: jax.Array | None,
    across: Across | None = None,
) -> tuple[jax.Array, jax.Array]:
    row = statistic(call, a, mask, across)
    y = _scaled(call, a, row, scale, bias)
    if row.empty is not None:
        y = jnp.where(row.empty, jnp.zeros_like(y), y)
    return y, row.inverse_rms


def _scaled(call: Call, a: jax.Array, row: Statistic, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    """a / rho, the gain and the bias, rounded as the variant says; each ``lost`` is what float64 rounded off."""
    exact = _is_exact(call)
    rho, a = row.rho, double(a) * row.inverse_power
    y = a / rho
    lost: Any = 0.0
    if exact:
        y = cut(y)
        lost = finite((-product_error(y, rho, a) - y * row.rho_error) / rho)
    if call.norm is not None:
        y = double(cast(y + lost, call.norm))
        if scale is not None:
            gain = double(cast(call.variant.scale_offset + _features(call, scale), call.product))
            product, lost = _product(y, gain, exact)
            y = double(cast(product + lost, call.product))
        if bias is not None:
            y = double(cast(y + _features(call, bias), call.product))
        return cast(y, call.result)
    if scale is not None:
        g = _features(call, scale)
        gain = call.variant.scale_offset + g
        product, product_lost = _product(y, gain, exact)
        if exact:
            lost = lost * gain + y * sum_error(g, call.variant.scale_offset, gain) + product_lost
        y = product
    if bias is not None:
        b = _features(call, bias)
        product, y = y, y + b
        if exact:
            lost = lost + sum_error(product, b, y)
    return cast(y + finite(lost) if exact else y, call.result)


def backward(
    call: Call,
    dy: jax.Array,
    a: jax.Array,
    scale: jax.Array | None,
    mask: jax.Array | None,
    inverse_rms: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dx, dscale and dbias in float64, from x and 1 / rho alone."""
    counted, k, empty = _counted(call, a, mask)
    v, a = double(dy), double(a)
    if mask is not None:
        v, a = jnp.where(mask & ~empty, v, 0.0), jnp.where(mask, a, 0.0)
    normalised = a * inverse_rms
    u = v if scale is None else v * (call.variant.scale_offset + _features(call, scale))
    along = _centred(call, normalised, counted, k) * _slope(call, k, inverse_rms)
    dx = inverse_rms * (u - along * (_sum(call, u * normalised) / k))
    return dx, _over_rows(call, v * normalised), _over_rows(call, v)


def tangent(
    call: Call,
    a: jax.Array,
    scale: jax.Array | None,
    mask: jax.Array | None,
    inverse_rms: jax.Array,
    da: jax.Array | None,
    dscale: jax.Array | None,
    dbias: jax.Array | None,
    across: Across | None = None,
) -> tuple[jax.Array, jax.Array]:
    """dy and the tangent of 1 / rho in float64, from x and 1 / rho alone; its transpose is ``backward``."""
    counted, k, empty = _counted(call, a, mask, across)
    a = double(a) if mask is None else jnp.where(mask, double(a), 0.0)
    normalised = a * inverse_rms
    dy, dinverse_rms = jnp.zeros_like(a), jnp.zeros_like(inverse_rms)
    if da is not None:
        da = double(da) if mask is None else jnp.where(mask, double(da), 0.0)
        along = _centred(call, normalised, counted, k, across) * _slope(call, k, inverse_rms)
        inner = _sum(call, along * da, across) / k
        dy = inverse_rms * (da - normalised * inner)
        dinverse_rms = -inverse_rms * (inverse_rms * inner)
        if scale is not None:
            dy = dy * (call.variant.scale_offset + _features(call, scale))
    if dscale is not None:
        dy = dy + normalised * _features(call, dscale)
    if dbias is not None:
        dy = dy + _features(call, dbias)
    return dy if mask is None else jnp.where(mask & ~empty, dy, 0.0), dinverse_rms


def _counted(
    call: Call, a: jax.Array, mask: jax.Array | None, across: Across | None = None
) -> tuple[jax.Array | None, Any, Any]:
    """Elements that enter the statistic (None for all), how many, and rows without any (None where there are none)."""
    if mask is None and call.k == call.n and call.n:
        return None, _across(np.float64(call.k), across), None
    shape = [size if axis in call.axes else 1 for axis, size in enumerate(a.shape)]
    counted = (jnp.arange(call.n or 0) < (call.k or 0)).reshape(shape)
    if mask is not None:
        counted = counted & mask
    counted = jnp.broadcast_to(counted, a.shape)
    k = _sum(call, counted.astype(jnp.float64), across)
    return counted, jnp.maximum(k, 1.0), k == 0


def _centred(call: Call, a: jax.Array, counted: jax.Array | None, k: Any, across: Across | None = None) -> jax.Array:
    """What the statistic squares: a, or for a variance a less its mean; 0 where not counted."""
    if counted is not None:
        a = jnp.where(counted, a, 0.0)
    if call.variant.statistic == "variance":
        a = a - _sum(call, a, across) / k
        a = a if counted is None else jnp.where(counted, a, 0.0)
    return a


def _eps(call: Call, k: Any, inverse_power: Any = 1.0) -> tuple[Any, Any, Any]:
    """Eps under the root, eps beside it, and the floor under rho, in units of the scaled statistic."""
    position, eps = call.variant.eps_position, call.eps
    return (
        eps * inverse_power * inverse_power if position == "inside" else 0.0,
        eps * inverse_power if position == "outside" else 0.0,
        eps * inverse_power / k**0.5 if position == "clamp" else 0.0,
    )


def _slope(call: Call, k: Any, inverse_rms: jax.Array) -> Any:
    """rho / s, with drho / da = a / (k s): 1 for eps inside, rho / (rho - eps) outside, 1 or 0 for a clamp."""
    _, outside, floor = _eps(call, k)
    if call.variant.eps_position == "outside":
        share = 1 - outside * inverse_rms
        return jnp.where(share > 0, 1 / jnp.where(share > 0, share, 1.0), 0.0)
    if call.variant.eps_position == "clamp":  # rho == floor up to the rounding of 1 / rho
        return (inverse_rms * floor < 1 - 2.0**-50).astype(jnp.float64)
    return 1.0


def _is_exact(call: Call) -> bool:
    return bool(call.n) and "float64" in (call.x, call.result)


def _inverse_power(call: Call, a: jax.Array, k: Any, across: Across | None) -> Any:
    """2^-e with 2^e next to the largest of |a| and eps: keeps every square in range, and scaling by it is exact."""
    length = sum(_eps(call, k)) ** (0.5 if call.variant.eps_position == "inside" else 1)
    largest = jnp.maximum(jnp.max(abs(a), axis=call.axes, keepdims=True), length)
    if across is not None:
        largest = lax.pmax(largest, across.axis_name, axis_index_groups=across.groups)
    power = lax.bitcast_convert_type(lax.bitcast_convert_type(largest, jnp.int64) & 0x7FF0000000000000, jnp.float64)
    return 1 / jnp.clip(power, 2.0**-1022, 2.0**1022)


def _product(a: jax.Array, b: jax.Array, exact: bool) -> tuple[jax.Array, Any]:
    if not exact:
        return a * b, 0.0
    product = cut(a * b)
    return product, product_error(a, b, product)


def _sum(call: Call, terms: jax.Array, across: Across | None = None) -> jax.Array:
    return _across(jnp.sum(terms, axis=call.axes, keepdims=True), across)


def _across(part: Any, across: Across | None) -> Any:
    return part if across is None else lax.psum(part, across.axis_name, axis_index_groups=across.groups)


def _features(call: Call, parameter: jax.Array) -> jax.Array:
    return double(parameter).reshape(call.feature_shape)


def _over_rows(call: Call, terms: jax.Array) -> jax.Array:
    """Sum over the axes that share the parameters, in the shape of the parameters."""
    return jnp.sum(terms, axis=call.shared_axes)
