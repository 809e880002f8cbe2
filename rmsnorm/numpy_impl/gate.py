"""The factor f(z) of a gate z and its derivative, in 106-bit arithmetic.

    sigmoid: f = s(z),    f' = s(z) s(-z)            s(z) = 1 / (1 + exp(-z))
    silu:    f = z s(z),  f' = s(z) (1 + z s(-z))

Both to about 2^-92 + 2^-103 |z|, as numbers times powers of two, as f(z) soon leaves the range of float64. For z below
-2^16 both are 0.
"""

from __future__ import annotations

import numpy as np

from rmsnorm.call import Call
from rmsnorm.numpy_impl.arithmetic import Scaled, plus, scaled, times
from rmsnorm.numpy_impl.double_double import Array, DoubleDouble


def factor(call: Call, gate: Array) -> Scaled:
    z = gate.astype(np.float64)
    return times(scaled(z), _sigmoid(z)) if call.variant.gate_function == "silu" else _sigmoid(z)


def slope(call: Call, gate: Array) -> Scaled:
    z = gate.astype(np.float64)
    rest = _sigmoid(-z)
    if call.variant.gate_function == "silu":
        rest = plus(scaled(np.ones_like(z)), times(scaled(z), rest))
    return times(_sigmoid(z), rest)


def _sigmoid(z: Array) -> Scaled:
    """By the exponential of -|z|, which stays in range."""
    power, exponent = DoubleDouble(-np.abs(z)).exp()
    share = DoubleDouble(1.0) / (DoubleDouble(1.0) + power.scaled(exponent))
    below = power * share
    parts = DoubleDouble(np.where(z < 0, below.hi, share.hi), np.where(z < 0, below.lo, share.lo))
    return parts, np.where(z < 0, exponent, 0)
