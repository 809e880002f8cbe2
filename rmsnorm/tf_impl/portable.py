"""The operations of RMSNorm in float32, by operations that every converter of TensorFlow graphs knows.

It stands in a graph beside operations.py, whose float64 LiteRT does not have. Every row is divided by its largest
number, so that no square leaves the range. Derivatives are TensorFlow's own.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from rmsnorm.call import Call
from rmsnorm.tf_impl import operations


def forward(
    call: Call, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None
) -> list[tf.Tensor]:
    """As graph.forward: y, and 1 / rho twice, in the formats of the operations and of the result."""
    y, inverse_rms = _normalised(call, tf.cast(h, tf.float32), mask)
    gain, shift = _parameters(call, scale, bias)
    if call.norm is not None:  # each operation is rounded as the variant says
        y = _rounded(y, call.norm)
        gain = None if gain is None else _rounded(gain, call.product)
    if gain is not None:
        y = y * gain
        y = y if call.norm is None else _rounded(y, call.product)
    y = tf.cast(y if shift is None else y + shift, call.result)
    return [y, tf.cast(inverse_rms, tf.float64), inverse_rms]


def backward(
    call: Call,
    dy: tf.Tensor,
    h: tf.Tensor,
    scale: tf.Tensor | None,
    bias: tf.Tensor | None,
    mask: tf.Tensor | None,
    inverse_rms: tf.Tensor,
) -> list[tf.Tensor | None]:
    """As eager.rounded_backward, from x alone: the derivative of y as it is before it is rounded."""
    v, primals = tf.cast(dy, tf.float32), (h, scale, bias)
    wide = [None if p is None else tf.cast(p, tf.float32) for p in primals]
    live = None
    if mask is not None:
        live = mask & ~_counted(call, h, mask)[2]
        v, wide[0] = tf.where(live, v, 0.0), tf.where(live, wide[0], 0.0)
    present = [p for p in wide if p is not None]
    y, _ = _normalised(call, wide[0], mask)
    gain, shift = _parameters(call, *wide[1:])
    y = y if gain is None else y * gain
    y = y if shift is None else y + shift
    gradients = iter(tf.gradients(y, present, v))
    results = [None if p is None else tf.cast(next(gradients), p.dtype) for p in primals]
    return results if live is None else [tf.where(live, results[0], tf.zeros_like(results[0])), *results[1:]]


def _normalised(call: Call, h: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
    """h / rho and 1 / rho, 0 in rows with nothing counted."""
    part, c = operations._part(call, h, mask)
    counted, k, empty = _counted(part, c, mask)
    eps, position = call.eps, call.variant.eps_position
    c = c if counted is None else tf.where(counted, c, 0.0)
    length = {"inside": eps**0.5, "outside": eps, "clamp": eps / tf.sqrt(k)}[position]
    largest = tf.maximum(tf.reduce_max(tf.abs(c), call.axes, keepdims=True), length)
    largest = tf.minimum(largest, tf.float32.max)  # an infinite number is not counted as 1
    largest = tf.stop_gradient(largest if empty is None else tf.where(empty, 1.0, largest))
    c = c / largest
    if call.variant.statistic == "variance":
        c = c - tf.reduce_sum(c, call.axes, keepdims=True) / k
        c = c if counted is None else tf.where(counted, c, 0.0)
    square = tf.reduce_sum(c * c, call.axes, keepdims=True) / k
    if position == "inside" and eps:
        root = tf.sqrt(square + tf.square(length / largest))
    else:
        positive = square > 0  # where the root has a finite slope
        root = tf.where(positive, tf.sqrt(tf.where(positive, square, 1.0)), 0.0)
    if position == "outside":
        root = root + eps / largest
    if position == "clamp":
        root = tf.maximum(root, length / largest)
    if empty is None:
        return h / largest / root, 1 / (root * largest)
    root = tf.where(empty, 1.0, root)
    return tf.where(empty, 0.0, h / largest / root), tf.where(empty, 0.0, 1 / (root * largest))


def _counted(call: Call, h: tf.Tensor, mask: tf.Tensor | None) -> tuple[Any, tf.Tensor, Any]:
    """As operations._counted, in operations of LiteRT where the size of a row is known."""
    if not call.n:
        counted, k, empty = operations._counted(call, h, mask)
        return counted, tf.cast(k, tf.float32), empty
    counted = None
    if call.k != call.n:
        first = [size if axis in call.axes else 1 for axis, size in enumerate(call.shape)]
        counted = tf.reshape(tf.range(call.n) < call.k, first)
    if mask is None:
        return counted, tf.constant(call.k, tf.float32), None
    counted = tf.broadcast_to(mask if counted is None else counted & mask, tf.shape(h))
    k = tf.reduce_sum(tf.cast(counted, tf.float32), call.axes, keepdims=True)
    return counted, tf.maximum(k, 1.0), tf.equal(k, 0)


def _parameters(call: Call, scale: tf.Tensor | None, bias: tf.Tensor | None) -> list[Any]:
    """The factor and the summand, in shapes that broadcast against x."""
    gain, shift = (None if p is None else _features(call, tf.cast(p, tf.float32)) for p in (scale, bias))
    if gain is not None and call.variant.scale_offset:
        gain = call.variant.scale_offset + gain
    return [gain, shift]


def _features(call: Call, parameter: tf.Tensor) -> tf.Tensor:
    if None not in call.feature_shape:
        return tf.reshape(parameter, call.feature_shape)
    return operations._features(call, parameter, parameter)


def _rounded(x: tf.Tensor, dtype: str) -> tf.Tensor:
    return tf.cast(tf.cast(x, dtype), tf.float32)
