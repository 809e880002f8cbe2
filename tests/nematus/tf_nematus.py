"""Nematus's models and cells in Keras and TensorFlow, for tests that hold for all frameworks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import nematus_framework
import tensorflow as tf

from rmsnorm.nematus import tf_models as nematus
from rmsnorm.nematus.backends import model_class

KEY = "tf"


@contextmanager
def quick() -> Iterator[None]:
    """Without graphs."""
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)


wide = quick


def array(value: Any, dtype: str | None = None) -> Any:
    return tf.constant(value) if dtype is None else tf.cast(value, dtype)


def numpy(value: Any) -> Any:
    return tf.convert_to_tensor(value).numpy()  # the gradients of embeddings are slices


class Model(nematus_framework.Model):
    numpy = staticmethod(numpy)

    def __init__(self, config: Any, parameters: Any, *, training: bool = False, seed: int = 0) -> None:
        self.own = model_class("tf", config)(config, parameters)
        self.own.seed.state.assign([seed, 0])
        self.options = {"training": training}

    def gradients(self, *sentences: Any) -> dict[str, Any]:
        weights = self.own.by_name()
        with tf.GradientTape() as tape:
            mean = tf.reduce_mean(self.own.loss(*sentences, **self.options))
        return dict(zip(weights, map(numpy, tape.gradient(mean, list(weights.values()))), strict=True))


def new_cell(cell: str, size: int, state: int, **options: Any) -> Any:
    keras.utils.set_random_seed(0)
    layer = nematus.Recurrent(cell, state, **options)
    layer.build((None, None, size))
    return layer


def load(layer: Any, weights: dict[str, Any]) -> None:
    assert layer.by_name().keys() == weights.keys()
    for name, value in weights.items():
        layer.by_name()[name].assign(value)
