"""The arithmetic of RMSNorm in float32, by operations that every converter of TensorFlow graphs knows.

It stands in a graph beside operations.py, whose float64 LiteRT does not have. Derivatives are TensorFlow's own.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from rmsnorm.specification.call import Call, without_none
from rmsnorm.tf_impl import operations
from rmsnorm.tf_impl.portable import counted_only, length, normalised, with_parameters


def forward(
    call: Call, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None
) -> list[tf.Tensor]:
    """As graph.forward: y, and 1 / rho twice, in the formats of the arithmetic and of the result."""
    y, inverse_rms, empty = _normalised(call, tf.cast(h, tf.float32), mask)
    y = tf.cast(_scaled(call, y, scale, bias, is_rounded=True), call.result)
    y = y if empty is None else tf.where(empty, tf.zeros_like(y), y)
    return [y, tf.cast(inverse_rms, tf.float64), inverse_rms]


def backward(
    call: Call, dy: tf.Tensor, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None,
    inverse_rms: tf.Tensor,
) -> list[tf.Tensor | None]:  # fmt: skip
    """As graph.backward, from x alone: the derivative of y as it is before it is rounded."""
    primals = (h, scale, bias)
    x, gain, shift = wide = [None if p is None else tf.cast(p, tf.float32) for p in primals]
    y, _, empty = _normalised(call, counted_only(tf, x, mask), mask)
    y = _scaled(call, y, gain, shift, is_rounded=False)
    y = y if mask is None else counted_only(tf, y, mask & ~empty)
    gradients = iter(tf.gradients(y, without_none(wide), tf.cast(dy, tf.float32)))
    return [None if p is None else tf.cast(next(gradients), p.dtype) for p in primals]


def _normalised(call: Call, h: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor, Any]:
    """h / rho and 1 / rho, both 0 in rows with nothing counted, and which rows these are."""
    part, c = operations.leading_part(call, h, mask)
    counted, k, empty = operations.count(part, c, mask, tf.float32)
    largest = tf.reduce_max(tf.abs(counted_only(tf, c, counted)), call.axes, keepdims=True)
    largest = tf.minimum(tf.maximum(largest, length(call, k)), tf.float32.max)  # an infinite number is not to become 1
    largest = tf.stop_gradient(largest if empty is None else tf.where(empty, 1.0, largest))
    y, root = normalised(tf, tf.reduce_sum, call, h, c, counted, k, largest)
    if empty is None:
        return y / root, 1 / (root * largest), None
    root = tf.where(empty, 1.0, root)
    return tf.where(empty, 0.0, y / root), tf.where(empty, 0.0, 1 / (root * largest)), empty


def _scaled(call: Call, y: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, is_rounded: bool) -> Any:
    gain, shift = (None if p is None else operations.features(call, p, y) for p in (scale, bias))
    return with_parameters(tf, call, y, gain, shift, "float32", is_rounded)
