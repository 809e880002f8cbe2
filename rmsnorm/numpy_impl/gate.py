"""The factor f(z) of a gate z and its derivative, in 106-bit arithmetic.

    sigmoid: f = s(z),    f' = s(z) s(-z)            s(z) = 1 / (1 + exp(-z))
    silu:    f = z s(z),  f' = s(z) (1 + z s(-z))

Both to about 2^-92 + 2^-103 |z|, as numbers times powers of two, as f(z) soon leaves the range of float64. For z below
-2^16 both are 0.
"""

from __future__ import annotations

import numpy as np

from rmsnorm.numpy_impl.arithmetic import Scaled, product_of, scaled, sum_of
from rmsnorm.numpy_impl.double_double import Array, DoubleDouble
from rmsnorm.specification.call import Call


def factor(call: Call, gate: Array) -> Scaled:
    z = gate.astype(np.float64)
    sigmoid, _ = _sigmoids(z)
    return product_of(scaled(z), sigmoid) if call.variant.gate_function == "silu" else sigmoid


def slope(call: Call, gate: Array) -> Scaled:
    z = gate.astype(np.float64)
    sigmoid, other = _sigmoids(z)
    if call.variant.gate_function == "silu":
        other = sum_of(scaled(np.ones_like(z)), product_of(scaled(z), other))
    return product_of(sigmoid, other)


def _sigmoids(z: Array) -> tuple[Scaled, Scaled]:
    """s(z) and s(-z), by the exponential of -|z|, which stays in range."""
    power, exponent = DoubleDouble(-np.abs(z)).exp()
    large = DoubleDouble(1.0) / (DoubleDouble(1.0) + power.scaled(np.maximum(exponent, -1000)))  # below 1 for every z
    small = power * large

    def chosen(below: Array) -> Scaled:
        parts = DoubleDouble(np.where(below, small.hi, large.hi), np.where(below, small.lo, large.lo))
        return parts, np.where(below, exponent, 0)

    return chosen(z < 0), chosen(z > 0)
