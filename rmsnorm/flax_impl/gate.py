"""The factor f(z) of a gate z and its derivative, in the dtype of the product with the gate.

sigmoid: f = s(z),    f' = s(z) s(-z)            s(z) = 1 / (1 + exp(-z))
silu:    f = z s(z),  f' = s(z) (1 + z s(-z))
"""

from __future__ import annotations

import jax

from rmsnorm.call import Call


def factor(call: Call, gate: jax.Array) -> jax.Array:
    z = gate.astype(call.gate)
    return jax.nn.silu(z) if call.variant.gate_function == "silu" else jax.nn.sigmoid(z)


def slope(call: Call, gate: jax.Array) -> jax.Array:
    z = gate.astype(call.gate)
    below = jax.nn.sigmoid(-z)
    return jax.nn.sigmoid(z) * (1 + z * below if call.variant.gate_function == "silu" else below)
