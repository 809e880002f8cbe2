"""A layer with weights by names with slashes, and functions of tensors as graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as bind
from typing import Any

import keras
import tensorflow as tf


class Named(keras.layers.Layer):
    """A layer or model whose weights have names with slashes, as ``gru0/state_to_gates``; with dots in Keras."""

    def add_by_name(self, name: str, shape: Any, initializer: Any) -> None:
        name = name.replace("/", ".")
        # As an attribute, because tf.train.Checkpoint and SavedModel find weights by attributes.
        setattr(self, name, self.add_weight(shape=shape, initializer=initializer, name=name))

    def by_name(self) -> dict[str, keras.Variable]:
        return {weight.name.replace(".", "/"): weight for weight in self.weights}

    def tensors(self) -> dict[str, tf.Tensor]:
        """The weights as tensors, read once and not in every step of a loop; in the compute dtype if Keras casts."""
        return {name: tf.convert_to_tensor(weight) for name, weight in self.by_name().items()}

    def save_own_variables(self, store: Any) -> None:
        for weight in self.by_name().values():
            store[weight.name] = weight.numpy()

    def load_own_variables(self, store: Any) -> None:
        weights = {weight.name: weight for weight in self.by_name().values()}
        if weights.keys() != set(store.keys()):
            missing, extra = sorted(weights.keys() - store.keys()), sorted(store.keys() - weights.keys())
            raise ValueError(
                f"{self.name}: the file lacks {missing[:1]} and holds {extra[:1]} instead, expected the weights by "
                "their names; is it the file of another model?"
            )
        for name, weight in weights.items():
            weight.assign(store[name])


class Graphs:
    """Runs functions of tensors: in eager mode as graphs of their own, in another graph as a part of it.

    Each function is traced once for all lengths and batches. It is traced again only for other dtypes, numbers of axes
    or options, and for parameters (a dictionary) with other names or shapes.
    """

    def __init__(self) -> None:
        self.traced: dict[Any, Any] = {}

    def run(self, function: Callable[..., Any], *tensors: Any, **options: Any) -> Any:
        """function(*tensors, **options); an argument is a tensor, parameters, or a list or tuple of tensors."""
        if not tf.executing_eagerly():
            return function(*tensors, **options)
        specs = [
            tf.nest.map_structure(_exact if isinstance(argument, dict) else _relaxed, argument) for argument in tensors
        ]
        key = (function.__name__, *map(str, specs), *options.items())
        if key not in self.traced:
            self.traced[key] = tf.function(bind(function, **options), input_signature=specs, autograph=False)
        return self.traced[key](*tensors)


def _exact(tensor: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _relaxed(tensor: tf.Tensor) -> tf.TensorSpec:
    is_sequence = tensor.shape.rank == 3 and tensor.dtype.is_floating  # its features are those of the model
    sizes = [None] * tensor.shape.rank
    return tf.TensorSpec([*sizes[:-1], tensor.shape[-1]] if is_sequence else sizes, tensor.dtype)
