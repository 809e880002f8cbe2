"""The factor f(z) of a gate z and its derivative, in the dtype of the product with the gate.

sigmoid: f = s(z),    f' = s(z) s(-z)            s(z) = 1 / (1 + exp(-z))
silu:    f = z s(z),  f' = s(z) (1 + z s(-z))
"""

from __future__ import annotations

import tensorflow as tf

from rmsnorm.specification.call import Call


def factor(call: Call, gate: tf.Tensor) -> tf.Tensor:
    z = tf.cast(gate, call.gate)
    return tf.nn.silu(z) if call.variant.gate_function == "silu" else tf.sigmoid(z)


def slope(call: Call, gate: tf.Tensor) -> tf.Tensor:
    z = tf.cast(gate, call.gate)
    below = tf.sigmoid(-z)
    return tf.sigmoid(z) * (1 + z * below if call.variant.gate_function == "silu" else below)
