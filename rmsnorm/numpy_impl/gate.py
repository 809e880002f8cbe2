"""The factor f(z) of a gate z and its derivative, in 106-bit arithmetic.

    sigmoid: f = s(z),    f' = s(z) s(-z)            s(z) = 1 / (1 + exp(-z))
    silu:    f = z s(z),  f' = s(z) (1 + z s(-z))

Both to about 2^-92 for |z| up to 630; the parts of a smaller exp(-|z|) are subnormal in float64.
"""

from __future__ import annotations

import numpy as np

from rmsnorm.call import Call
from rmsnorm.numpy_impl.double_double import Array, DoubleDouble


def factor(call: Call, gate: Array) -> DoubleDouble:
    z = gate.astype(np.float64)
    return DoubleDouble(z) * _sigmoid(z) if call.variant.gate_function == "silu" else _sigmoid(z)


def slope(call: Call, gate: Array) -> DoubleDouble:
    z = gate.astype(np.float64)
    below = _sigmoid(-z)
    rest = DoubleDouble(1.0) + DoubleDouble(z) * below if call.variant.gate_function == "silu" else below
    return _sigmoid(z) * rest


def _sigmoid(z: Array) -> DoubleDouble:
    """By the exponential of -|z|, which stays in range."""
    power = DoubleDouble(-np.abs(z)).exp()
    share = DoubleDouble(1.0) / (DoubleDouble(1.0) + power)
    below = power * share
    return DoubleDouble(np.where(z < 0, below.hi, share.hi), np.where(z < 0, below.lo, share.lo))
