"""Norms of Keras that `replace` is asked about: made, called, differentiated and copied."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

ROUNDING = 1e-4


@keras.saving.register_keras_serializable("tests")
class OwnNorm(keras.layers.Layer):
    """A norm with its own name of the gain, which drops some of y in training if it is asked to."""

    def __init__(self, eps: float = 1e-5, rate: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.eps, self.rate = eps, rate

    def build(self, shape: Any) -> None:
        self.gain = self.add_weight(shape=(shape[-1],), initializer=keras.initializers.RandomUniform(0.5, 2), name="g")

    def call(self, hidden: Any, training: bool = False) -> Any:
        q = keras.ops.mean(keras.ops.square(hidden), -1, keepdims=True)
        y = hidden * keras.ops.rsqrt(q + self.eps) * self.gain
        return y * (1 - self.rate) if training else y

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "eps": self.eps, "rate": self.rate}


@keras.saving.register_keras_serializable("tests")
class Gated(keras.layers.Layer):
    """Mamba-2's in groups of 4, or with a sigmoid after the norm; the gate may be left out."""

    def __init__(self, group: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.group = group

    def build(self, hidden_shape: Any, gate_shape: Any = None) -> None:
        self.gain = self.add_weight(shape=(hidden_shape[-1],), initializer="ones", name="weight")

    def call(self, hidden: Any, gate: Any = None) -> Any:
        ops = keras.ops
        f = 1.0 if gate is None else ops.silu(gate) if self.group else ops.sigmoid(gate)
        h = hidden * f if self.group else hidden
        wide = ops.reshape(h, (*ops.shape(h)[:-1], -1, self.group or h.shape[-1]))
        y = wide * ops.rsqrt(ops.mean(ops.square(wide), -1, keepdims=True) + 1e-5)
        return ops.reshape(y, ops.shape(h)) * self.gain * (1.0 if self.group else f)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "group": self.group}


@keras.saving.register_keras_serializable("tests")
class GroupsAlone(Gated):
    def build(self, hidden_shape: Any) -> None:
        super().build(hidden_shape)

    def call(self, hidden: Any) -> Any:
        return super().call(hidden)


class Counting(OwnNorm):
    def call(self, hidden: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return super().call(hidden)


class WithoutNaN(OwnNorm):
    def call(self, hidden: Any) -> Any:
        return keras.ops.nan_to_num(super().call(hidden))


def built(layer: Any) -> Any:
    shapes = [(None, None, 8)] * (2 if type(layer) is Gated else 1)
    layer.build(*shapes)
    return layer


RIGHT = {
    "own": lambda: built(OwnNorm()), "groups": lambda: built(GroupsAlone(4)), "silu gate": lambda: built(Gated(4)),
    "sigmoid gate": lambda: built(Gated()),
}  # fmt: skip
LEFT = {
    "LayerNorm": lambda: built(keras.layers.LayerNormalization()),
    "BatchNorm": lambda: built(keras.layers.BatchNormalization()),
    "counting": lambda: built(Counting()), "training": lambda: built(OwnNorm(rate=0.1)),
    "NaN": lambda: built(WithoutNaN()), "L2": lambda: built(keras.layers.UnitNormalization()),
}  # fmt: skip
EPS = {"own": (lambda: built(OwnNorm()), "eps", "1e-05")}


def call(layer: Any, *inputs: Any, **options: Any) -> Any:
    return np.asarray(layer(*inputs, **options))


def own_code(kind: Any, layer: Any, *inputs: Any, **options: Any) -> Any:
    return np.asarray(kind.call(layer, *map(tf.constant, inputs), **options))


def results(layer: Any, *inputs: Any) -> list[Any]:
    """y, and the gradients for the inputs and the parameters."""
    leaves = [tf.Variable(array) for array in inputs]
    with tf.GradientTape() as tape:
        y = layer(*map(tf.convert_to_tensor, leaves))
        loss = tf.reduce_sum(y * tf.stop_gradient(tf.cos(y)))
    gradients = tape.gradient(loss, [*leaves, *(weight.value for weight in layer.trainable_weights)])
    return [np.asarray(tensor) for tensor in (y, *gradients)]


def copies(layer: Any) -> list[Any]:
    """Keras saves a layer by its config, from which a new one is Keras's own again; test_replace_keras.py has that."""
    return [layer]


def double(layer: Any) -> None:
    """The gain is set to twice its value."""
    layer.set_weights([2 * weight for weight in layer.get_weights()])
