"""The arithmetic of RMSNorm on JAX arrays.

The statistic is float64, so that no square leaves the range. In 32 bits every element is computed in float64, which
makes y the correctly rounded number; in 16 bits, and in the derivatives that JAX takes, it is computed in float32. If
the call has a float64, all of it is float64; if x or y is float64, a row is multiplied by a power of two first, as its
squares might leave the range of float64.

If several operations read an array of x's size, XLA stores it: so each of them reads a copy here, behind a barrier. A
product that is summed over rows is v * (x / rho): as (v * x) / rho it takes XLA's CPU backend 50 times as long.

Gradients of the parameters are sums over rows in float64, in XLA's order, and rounded once. How rows are divided among
calls, threads and devices changes no bit of a sum that is rounded to 16 or 32 bits, but where it lies in the middle of
two numbers. Under vmap each mapped part has a sum of its own.

To be called with x64 enabled. JAX differentiates ``tangent`` and nothing else here.
"""

from __future__ import annotations

from functools import partial as bind
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from rmsnorm.flax_impl.rounding import (
    clip,
    convert,
    converted_sum,
    double,
    number_as,
    power_of_two,
    rounded_within,
    through_bits,
    where,
    zero_outside,
    zeros_of,
)
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Call
from rmsnorm.specification.variants import CLAMPED


class Across(NamedTuple):
    """A named axis over which rows are spread: sums of a row go over it too."""

    axis_name: Any
    groups: tuple[tuple[int, ...], ...] | None = None


class Statistic(NamedTuple):
    """What is computed of every row; the normalised axes have size 1.

    ``rho`` is that of h * inverse_power, a power of two that is 1 unless x or y is float64: 1 / rho of h is
    ``inverse_rms`` = inverse_power / rho.
    """

    empty: jax.Array | None
    inverse_power: Any
    rho: jax.Array
    inverse_rms: jax.Array


def statistic(call: Call, h: jax.Array, mask: jax.Array | None, across: Across | None = None) -> Statistic:
    call, h = _part(call, h, mask)
    counted, k, empty = counted_elements(call, h, mask, across)
    inverse_power: Any = 1.0
    if may_leave_range(call):
        c = zero_outside(counted, double(h))
        inverse_power = _inverse_power(call, c, k, across)
        c = c * inverse_power
        q = _sum(call, c * c, across) / k
    else:
        q = _across(_squares(call, h, counted, k, across), across) / k
    inside, outside, floor = _eps(call, k, inverse_power)
    rho = jnp.maximum(jnp.sqrt(q + inside) + outside, floor)
    inverse_rms = inverse_power / rho
    if empty is not None:
        inverse_rms = zero_outside(~empty, inverse_rms)
    return Statistic(empty, inverse_power, rho, inverse_rms)


def _squares(call: Call, h: jax.Array, counted: jax.Array | None, k: Any, across: Across | None) -> jax.Array:
    """Sum of squares in float64; of 16 bits to 16 bits in float32, where no row leaves its range."""

    def squares(dtype: str) -> jax.Array:
        c = convert(zero_outside(counted, h), dtype)
        return convert(_sum(call, c * c), "float64")

    if elementwise(call) == "float64":
        return squares("float64")
    quick = squares("float32")
    if call.x == "float16":
        return quick
    inside, outside, floor = _eps(call, 1.0)
    lost = (call.n or 0) * 2.0**-100  # n squares that underflow, each below 2^-126, are at most 2^-26 of this
    sound = jnp.all((quick + inside + (outside + floor) ** 2 > lost) & (quick < jnp.inf))
    return lax.cond(sound, lambda: quick, lambda: squares("float64"))


def forward(
    call: Call, h: jax.Array, scale: jax.Array | None, bias: jax.Array | None, mask: jax.Array | None,
    across: Across | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    row = statistic(call, h, mask, across)
    h, inverse_rms = lax.optimization_barrier((h, row.inverse_rms))
    if elementwise(call) == "float64" and {call.norm, call.result} & set(dtypes.HALF):
        inverse_rms = through_bits(inverse_rms)
    y = _scaled(call, h, row._replace(inverse_rms=inverse_rms), scale, bias)
    if row.empty is not None:
        y = jnp.where(row.empty, jnp.zeros((), y.dtype), y)
    return y, row.inverse_rms


def _scaled(call: Call, h: jax.Array, row: Statistic, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    """h / rho, the gain and the bias, rounded as the variant says."""
    wide = elementwise(call)
    if may_leave_range(call):
        y = double(h) * row.inverse_power / row.rho
    else:
        y = _over_rho(h, row.inverse_rms, wide)
    if call.norm is None:
        if scale is not None:
            y = y * gain(call, scale, wide)
        if bias is not None:
            y = y + _features(call, bias, wide)
        return convert(y, call.result)
    # A product of two float32 is rounded by itself, unless XLA contracts it with a sum.
    wide = dtypes.arithmetic(call.product) if bias is None else "float64"
    y = rounded_within(y, call.norm, wide)
    if scale is not None:
        y = rounded_within(y * rounded_within(gain(call, scale, wide), call.product, wide), call.product, wide)
    if bias is not None:
        y = rounded_within(y + _features(call, bias, wide), call.product, wide)
    return convert(y, call.result)


def _over_rho(h: jax.Array, inverse_rms: jax.Array, dtype: str) -> jax.Array:
    """h / rho; in float32 by two factors, as 1 / rho alone may leave its range."""
    if dtype == "float64":
        return convert(h, dtype) * convert(inverse_rms, dtype)
    power = clip(power_of_two(lax.stop_gradient(inverse_rms)), 2.0**-64, 2.0**64)
    return (convert(h, dtype) * convert(power, dtype)) * convert(inverse_rms / power, dtype)


def tangent(
    call: Call, h: jax.Array, scale: jax.Array | None, mask: jax.Array | None, inverse_rms: jax.Array,
    dh: jax.Array | None, dscale: jax.Array | None, dbias: jax.Array | None, across: Across | None = None, *,
    as_y: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """dy and the tangent of 1 / rho. If ``as_y`` they are computed in the dtype in which y is computed.

    Otherwise it is float32, or float64 if an array is. The gradients are the transpose. With jax.checkpoint that keeps
    only the inputs, of which x alone has the size of x.
    """
    wide = elementwise(call) if as_y else _derived(call)
    terms, dinverse_rms = [zeros_of(h, wide)], zeros_of(inverse_rms, inverse_rms.dtype)
    if dh is not None:
        along_x = jax.checkpoint(bind(_along_x, call, wide, across))
        terms[0], dinverse_rms = along_x(h, scale, mask, inverse_rms, dh)
    along_parameters = jax.checkpoint(bind(_along_parameters, call, wide, across))
    if dscale is not None:
        terms.append(along_parameters(h, mask, inverse_rms, dscale, None))
    if dbias is not None:
        terms.append(along_parameters(h, mask, inverse_rms, None, dbias))
    return converted_sum(terms, call.result), dinverse_rms


def _along_x(
    call: Call, wide: str, across: Across | None, h: Any, scale: Any, mask: Any, inverse_rms: Any, dh: Any
) -> tuple[jax.Array, jax.Array]:
    counted, k, empty = counted_elements(call, h, mask, across)
    varying = _varying(mask, empty)
    normalised = _over_rho(zero_outside(varying, h), inverse_rms, wide)
    dh = _over_rho(zero_outside(varying, convert(dh, wide)), inverse_rms, wide)
    along = normalised  # what the statistic squares, over rho
    if may_leave_range(call):
        along = _over_rho(zero_outside(counted, double(h)), inverse_rms, wide)
    elif counted is not None:
        x, inverse = lax.optimization_barrier((h, inverse_rms))
        along = _over_rho(zero_outside(counted, x), inverse, wide)
    along = along * _slope(call, h, counted, k, inverse_rms, wide, across)
    # The transpose would be NaN without the first of the two masks that follow, where 0 is multiplied by an infinite
    # sum, and without the second one, where 0 is multiplied by an infinite or NaN 1 / rho.
    inner = _sum(call, zero_outside(counted, along * dh), across) / number_as(k, wide)
    if counted is not None:
        inner = lax.optimization_barrier(inner)
    dy = dh - normalised * inner
    if scale is not None:
        dy = dy * gain(call, scale, wide)
    return zero_outside(varying, dy), -inverse_rms * convert(inner, "float64")


def _along_parameters(
    call: Call, wide: str, across: Across | None, h: Any, mask: Any, inverse_rms: Any, dscale: Any, dbias: Any
) -> jax.Array:
    # spread over the rows in float64, so that the transpose sums in float64
    dy = convert(zeros_of(h, "float64") + _features(call, dbias if dscale is None else dscale), wide)
    varying = _varying(mask, counted_elements(call, h, mask, across)[2])
    if dscale is not None:
        dy = zero_outside(varying, _over_rho(zero_outside(varying, h), inverse_rms, wide)) * dy
    return zero_outside(varying, dy)


def elementwise(call: Call) -> str:
    """Dtype in which y is computed before it is rounded."""
    short = {call.x, call.result} <= set(dtypes.HALF) and call.product != "float64"
    return "float32" if short else "float64"


def _derived(call: Call) -> str:
    """Dtype of the derivatives that JAX asks for, before they are rounded."""
    return dtypes.arithmetic(dtypes.promote(call.x, call.product, call.result))


def counted_elements(
    call: Call, h: jax.Array, mask: jax.Array | None, across: Across | None = None
) -> tuple[jax.Array | None, Any, Any]:
    """Elements that enter the statistic (None for all), how many, and rows without any (None where there are none)."""
    if mask is None and call.n:
        k = np.float64(call.k) if isinstance(call.k, int) else jnp.asarray(call.k, "float64")  # a symbol of jax.export
        return None if call.k == call.n else _first(call, h), _across(k, across), None
    counted = _first(call, h)
    if mask is not None:
        counted = counted & mask
    counted = jnp.broadcast_to(counted, h.shape)
    k = _sum(call, counted.astype(jnp.float64), across)
    return counted, jnp.maximum(k, 1.0), k == 0


def _first(call: Call, h: jax.Array) -> jax.Array:
    shape = [size if axis in call.axes else 1 for axis, size in enumerate(h.shape)]
    return (jnp.arange(call.n or 0) < (call.k or 0)).reshape(shape)


def _part(call: Call, h: jax.Array, mask: jax.Array | None) -> tuple[Call, jax.Array]:
    """What the statistic is computed of, and the call on that. If there is no mask, ``partial`` counts the first
    elements: for partial=0.25 and 16 elements it is x[..., :4]."""
    if mask is not None or (leading := call.leading) is None:
        return call, h
    return leading, lax.slice_in_dim(h, 0, leading.n, axis=call.axes[0])


def _varying(mask: jax.Array | None, empty: Any) -> jax.Array | None:
    """Elements whose y is not constant, None for all."""
    return None if mask is None else mask & ~empty


def _eps(call: Call, k: Any, inverse_power: Any = 1.0) -> tuple[Any, Any, Any]:
    """Eps under the root, eps beside it, and the floor under rho, in units of the scaled statistic."""
    position, eps = call.variant.eps_position, call.eps
    return (
        eps * inverse_power * inverse_power if position == "inside" else 0.0,
        eps * inverse_power if position == "outside" else 0.0,
        eps * inverse_power / k**0.5 if position == "clamp" else 0.0,
    )


def _slope(
    call: Call, h: jax.Array, counted: jax.Array | None, k: Any, inverse_rms: jax.Array, dtype: str,
    across: Across | None,
) -> Any:  # fmt: skip
    """rho / s, with drho / dh = h / (k s): 1 for eps inside, rho / (rho - eps) outside, 1 or 0 for a clamp."""
    if call.variant.eps_position == "outside":
        root_share = 1 - call.eps * inverse_rms  # of rho = s + eps
        return convert(zero_outside(root_share > 0, 1 / where(root_share > 0, root_share, 1.0)), dtype)
    if call.variant.eps_position == "clamp":  # it begins where the length of a row over rho is eps / rho
        along = zero_outside(counted, double(h)) * inverse_rms
        is_constant = _sum(call, along * along, across) < (call.eps * CLAMPED * inverse_rms) ** 2
        return 1 - is_constant.astype(dtype)
    return 1.0


def may_leave_range(call: Call) -> bool:
    """Whether products of the numbers of a call may leave the range of float64."""
    return bool(call.n) and "float64" in (call.x, call.result)


def _inverse_power(call: Call, h: jax.Array, k: Any, across: Across | None) -> Any:
    """2^-e with 2^e next to the largest of |a| and eps: keeps every square in range, and scaling by it is exact."""
    length = sum(_eps(call, k)) ** (0.5 if call.variant.eps_position == "inside" else 1)
    largest = jnp.maximum(jnp.max(abs(h), axis=call.axes, keepdims=True), length)
    if across is not None:
        largest = lax.pmax(largest, across.axis_name, axis_index_groups=across.groups)
    return 1 / clip(power_of_two(largest), 2.0**-1022, 2.0**1022)


def _sum(call: Call, terms: jax.Array, across: Across | None = None) -> jax.Array:
    return _across(jnp.sum(terms, axis=call.axes, keepdims=True), across)


def _across(part: Any, across: Across | None) -> Any:
    return part if across is None else lax.psum(part, across.axis_name, axis_index_groups=across.groups)


def gain(call: Call, scale: jax.Array, dtype: str = "float64") -> jax.Array:
    """o + g. An o of 0 is not added: it would make +0 of a gain that is -0."""
    g = _features(call, scale, dtype)
    return call.variant.scale_offset + g if call.variant.scale_offset else g


def _features(call: Call, parameter: jax.Array, dtype: str = "float64") -> jax.Array:
    return convert(parameter, dtype).reshape(call.feature_shape)
