"""A call with a gate or not, in plain operations: the factor f(z) before or after the norm of operations.py.

sigmoid: f = s(z),    f' = s(z) s(-z)            s(z) = 1 / (1 + exp(-z))
silu:    f = z s(z),  f' = s(z) (1 + z s(-z))

f(z) and f'(z) are in the dtype of the product with the gate. JAX differentiates ``tangent`` and ``backward``. They get
``normalise`` of kernels.py as ``norm``, as JAX can differentiate it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jax import lax
from jax import numpy as jnp

from rmsnorm.call import Call
from rmsnorm.flax_impl import operations
from rmsnorm.flax_impl.operations import Across
from rmsnorm.flax_impl.rounding import convert

Pair: TypeAlias = tuple[jax.Array, jax.Array]
Norm: TypeAlias = Callable[..., Pair]


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
    return convert(y * f, call.result), inverse_rms


def inverse_rms(call: Call, h: jax.Array, mask: Any, gate: jax.Array | None) -> jax.Array:
    if gate is None:
        return operations.statistic(call, h, mask).inverse_rms
    if call.is_gated_before:
        h = convert(h, str(call.gate)) * factor(call, gate)
    return operations.statistic(call.without_gate, h, mask).inverse_rms


def backward(
    call: Call, norm: Norm, dy: jax.Array, h: jax.Array, scale: Any, bias: Any, mask: Any, gate: jax.Array | None,
    dh: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:  # fmt: skip
    """dx + dh, dscale, dbias and dgate, before they are rounded."""
    inner, rho, v, dgate = call, inverse_rms(call, h, mask, gate), dy, None
    if gate is not None:
        inner, f = call.without_gate, factor(call, gate)
        own = convert(h if call.is_gated_before else dy, f.dtype.name)  # what is multiplied by f(z)
        h, v = (own * f, dy) if call.is_gated_before else (h, own * f)
    dx, dscale, dbias = operations.backward(inner, v, h, scale, mask, rho)
    if gate is not None:
        other = dx if call.is_gated_before else norm(inner, None, h, scale, bias, mask, None)[0]
        f, own, df = (convert(t, other.dtype.name) for t in (f, own, slope(call, gate)))
        dgate = _unmasked(own * other * df, mask)
        dx = _unmasked(dx * f, mask) if call.is_gated_before else dx
    return dx if dh is None else dx + convert(dh, dx.dtype.name), dscale, dbias, dgate


def tangent(
    call: Call, norm: Norm, h: jax.Array, scale: Any, bias: Any, mask: Any, gate: jax.Array | None,
    inverse_rms: jax.Array, dh: Any, dscale: Any, dbias: Any, dgate: Any, across: Across | None = None,
) -> Pair:  # fmt: skip
    """dy and the tangent of 1 / rho. Only dgate needs the bias."""
    if gate is None:
        return operations.tangent(call, h, scale, mask, inverse_rms, dh, dscale, dbias, across)
    h, gate, inner = _held(h, mask), _held(gate, mask), call.without_gate
    f, df = factor(call, gate), None
    if dgate is not None:  # each factor is 0 under the mask, so that no NaN there comes back in the transpose
        df = convert(_unmasked(dgate, mask), f.dtype.name) * _unmasked(slope(call, gate), mask)
    if call.is_gated_before:
        own = convert(h, f.dtype.name)
        terms = [] if dh is None else [convert(_unmasked(dh, mask), f.dtype.name) * f]
        terms += [] if df is None else [own * df]
        h, dh = own * f, sum(terms[1:], terms[0]) if terms else None
    pair = operations.tangent(inner, h, scale, mask, inverse_rms, dh, dscale, dbias, across)
    if call.is_gated_before:
        return pair
    dy = pair[0] * f
    if df is not None:
        dy = dy + norm(inner, across, h, scale, bias, mask, None)[0] * df
    return convert(_unmasked(dy, mask), call.result), pair[1]


def _held(values: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The values, of which derivatives take those under the mask as constants."""
    return values if mask is None else jnp.where(mask, values, lax.stop_gradient(values))


def _unmasked(values: jax.Array, mask: jax.Array | None) -> jax.Array:
    """0 under the mask, where gate and x may be NaN."""
    return values if mask is None else jnp.where(mask, values, jnp.zeros_like(values))
