"""The operations of models/operations.py in TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial as bind
from typing import Any, Final

import keras
import numpy as np
import tensorflow as tf

from rmsnorm.nematus.models.operations import Arrays, Step
from rmsnorm.tf_impl import functional

cached: Final = None
attention: Final = None

tanh, sigmoid, relu = tf.tanh, tf.sigmoid, tf.nn.relu
concatenated, repeated, sum, rows = tf.concat, tf.repeat, tf.reduce_sum, tf.gather
split, reshape = bind(tf.split, axis=-1), tf.reshape
picked = bind(tf.gather, batch_dims=2)
logsumexp, to_host = tf.reduce_logsumexp, np.asarray
transposed, swapped = tf.linalg.matrix_transpose, bind(tf.transpose, perm=(0, 2, 1, 3))
rms_norm = bind(functional.rms_norm, variant="nematus")


def shape(x: tf.Tensor) -> Sequence[Any]:
    return tf.unstack(tf.shape(x))


def cast(x: Any, like: Any) -> tf.Tensor:
    return tf.cast(x, like.dtype)


def filled(shape: Sequence[Any], value: float, like: tf.Tensor) -> tf.Tensor:
    return tf.fill(shape, tf.cast(value, like.dtype))


def where(condition: tf.Tensor, x: tf.Tensor, other: float) -> tf.Tensor:
    return tf.where(condition, x, tf.cast(other, x.dtype))


def take(table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    return tf.gather(table, tf.maximum(ids, 0))


def matmul(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """As one product of matrices; TensorFlow's own operator makes one product for each step."""
    if x.shape.rank == 2 or w.shape.rank > 2:
        return x @ w
    y = tf.reshape(x, (-1, tf.shape(w)[0])) @ w
    return tf.reshape(y, (*tf.unstack(tf.shape(x))[:-1], w.shape[1]))


def softmax(x: tf.Tensor, axis: int) -> tf.Tensor:
    """Along another axis than the last, TensorFlow's own transposes x, which XLA cannot in the gradient of a loop."""
    if axis == -1:
        return tf.nn.softmax(x)
    weights = tf.exp(x - tf.stop_gradient(tf.reduce_max(x, axis, keepdims=True)))
    return weights / tf.reduce_sum(weights, axis, keepdims=True)


def log_softmax(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.log_softmax(_wide(x))


def layer_norm(x: tf.Tensor, gain: tf.Tensor, offset: tf.Tensor | None, eps: float) -> tf.Tensor:
    """LayerNorm, computed in at least float32."""
    centred = _wide(x)
    centred -= tf.reduce_mean(centred, -1, keepdims=True)
    y = centred * tf.math.rsqrt(tf.reduce_mean(tf.square(centred), -1, keepdims=True) + eps) * _wide(gain)
    return tf.cast(y if offset is None else y + _wide(offset), x.dtype)


def dropout(x: tf.Tensor, rate: float, random: Any) -> tf.Tensor:
    return keras.random.dropout(x, rate, seed=random)


def positions(start: Any, count: Any, length: Any, size: int, like: tf.Tensor) -> tf.Tensor:
    frequencies = np.exp(-np.arange(size // 2) * (math.log(10000) / (size // 2 - 1)))
    angles = tf.cast(tf.range(start, start + count), tf.float64)[:, None] * frequencies
    odd = tf.zeros((count, size % 2), tf.float64)
    return tf.cast(tf.concat((tf.sin(angles), tf.cos(angles), odd), 1), like.dtype)


def future(start: Any, count: Any, length: Any, score: float, like: tf.Tensor) -> tf.Tensor:
    is_future = tf.range(length) > tf.range(start, start + count)[:, None]
    return tf.cast(tf.where(is_future, score, 0.0), like.dtype)


def scan(
    step: Step, state: Arrays, inputs: Arrays, others: Arrays = (), *, reverse: bool = False
) -> tuple[Arrays, Arrays]:
    count = len(state)

    def body(last: Arrays, at_step: Arrays) -> Arrays:
        new, more = step(last[:count], at_step)
        return (*new, *more)

    results = tf.scan(body, inputs, (*state, *map(tf.zeros_like, others)), reverse=reverse)
    return results[:count], results[count:]


def checked(check: Callable[..., Any], ids: Any, mask: Any) -> Any:
    return check(ids, mask) if tf.executing_eagerly() else (ids, mask)


def as_ids(ids: Any, like: Any) -> tf.Tensor:
    return tf.cast(ids, tf.int64)


def _wide(x: tf.Tensor) -> tf.Tensor:
    return x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
