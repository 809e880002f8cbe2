"""A call with a gate or not, in plain operations: the factor f(z) before or after the norm of operations.py.

sigmoid: f = s(z),    f' = s(z) s(-z)            s(z) = 1 / (1 + exp(-z))
silu:    f = z s(z),  f' = s(z) (1 + z s(-z))

f(z) and f'(z) are in the dtype of the product with the gate. The gradients are the transpose of ``tangent``, in which
f'(z) is multiplied by the norm. For that it calls ``norm``, which kernels.py passes: ``normalise``, which JAX can
differentiate again for second derivatives, as it cannot differentiate operations.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import lax
from jax import numpy as jnp

from rmsnorm.flax_impl import operations
from rmsnorm.flax_impl.operations import Across
from rmsnorm.flax_impl.rounding import convert, zero_outside
from rmsnorm.specification.call import Call

Pair: TypeAlias = tuple[jax.Array, jax.Array]
Norm: TypeAlias = Callable[..., Pair]


class Operands(NamedTuple):
    """The arrays that a primitive of kernels.py takes, by name; None for an array that there is not.

    In the pass of the tangents dh, dgate, dscale and dbias are tangents. In the pass of the gradients dy and dh are the
    gradients with respect to y and to h = x + residual.
    """

    dy: Any = None
    h: Any = None
    inverse_rms: Any = None
    dh: Any = None
    gate: Any = None
    dgate: Any = None
    mask: Any = None
    scale: Any = None
    bias: Any = None
    dscale: Any = None
    dbias: Any = None


def factor(call: Call, gate: jax.Array) -> jax.Array:
    z = gate.astype(call.gate)
    return jax.nn.silu(z) if call.variant.gate_function == "silu" else jax.nn.sigmoid(z)


def slope(call: Call, gate: jax.Array) -> jax.Array:
    z = gate.astype(call.gate)
    below = jax.nn.sigmoid(-z)
    return jax.nn.sigmoid(z) * (1 + z * below if call.variant.gate_function == "silu" else below)


def forward(
    call: Call, h: jax.Array, scale: Any, bias: Any, mask: Any, gate: jax.Array | None, across: Across | None = None
) -> Pair:
    """y, and 1 / rho in float64."""
    if gate is None:
        return operations.forward(call, h, scale, bias, mask, across)
    f, inner = factor(call, gate), call.without_gate
    if call.is_gated_before:
        return operations.forward(inner, convert(h, f.dtype.name) * f, scale, bias, mask, across)
    y, inverse_rms = operations.forward(inner, h, scale, bias, mask, across)
    return convert(zero_outside(_shown(call, h, mask, across), y * f), call.result), inverse_rms


def tangent(call: Call, norm: Norm, of: Operands, across: Across | None = None, *, as_y: bool = False) -> Pair:
    """dy and the tangent of 1 / rho. Only dgate needs the bias."""
    _, h, inverse_rms, dh, gate, dgate, mask, scale, bias, dscale, dbias = of
    if gate is None:
        return operations.tangent(call, h, scale, mask, inverse_rms, dh, dscale, dbias, across, as_y=as_y)
    live = None if mask is None else mask & _shown(call, h, mask, across)
    h, gate, inner = _constant_outside(live, h), _constant_outside(live, gate), call.without_gate
    f, df = factor(call, gate), None
    if dgate is not None:  # each factor is 0 where y is constant, so that no NaN there comes back in the transpose
        df = convert(zero_outside(live, dgate), f.dtype.name) * zero_outside(live, slope(call, gate))
    if call.is_gated_before:
        wide = convert(h, f.dtype.name)
        terms = [] if dh is None else [convert(zero_outside(live, dh), f.dtype.name) * f]
        terms += [] if df is None else [wide * df]
        h, dh = wide * f, sum(terms[1:], terms[0]) if terms else None
    pair = operations.tangent(inner, h, scale, mask, inverse_rms, dh, dscale, dbias, across, as_y=as_y)
    if call.is_gated_before:
        return pair
    dy = pair[0] * f
    if df is not None:
        dy = dy + norm(inner, across, h, scale, bias, mask, None)[0] * df
    return convert(zero_outside(live, dy), call.result), pair[1]


def _shown(call: Call, h: jax.Array, mask: jax.Array | None, across: Across | None) -> jax.Array | None:
    """Rows of which the mask counts an element, None for all; in others y is 0, also where the gate is NaN."""
    return None if mask is None else ~operations.counted_elements(call, h, mask, across)[2]


def _constant_outside(mask: jax.Array | None, values: jax.Array) -> jax.Array:
    """The values, of which derivatives take those where a mask is False as constants."""
    return values if mask is None else jnp.where(mask, values, lax.stop_gradient(values))
