"""RNNSearch and the Transformer as Keras models, whose weights have the names of Nematus."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from rmsnorm.nematus import protocol
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.models import rnnsearch, transformer
from rmsnorm.nematus.models.parameters import Parameters
from rmsnorm.nematus.names import variables
from rmsnorm.nematus.tf import operations
from rmsnorm.nematus.tf.parameters import Graphs, Named


class Model(protocol.Model, Named, keras.Model):
    """A Keras model of batches (x, x_mask, y, y_mask), whose output is the loss of each sentence.

    ``compile`` takes no loss, because ``fit`` minimises the mean of the output. The batch is not the first axis: give
    ``fit`` whole batches, each in a tuple of its own, ((x, x_mask, y, y_mask),). ``training=True`` turns dropout on.
    The weights have Nematus's names with dots for slashes.
    """

    operations: ClassVar[Any] = operations

    def __init__(self, config: Config, parameters: Mapping[str, Any], **kwargs: Any) -> None:
        arrays = {name: np.asarray(parameters[name]) for name in sorted(parameters)}
        keras.Model.__init__(self, dtype=next(iter(arrays.values())).dtype.name, **kwargs)
        self.config = config
        self.seed = keras.random.SeedGenerator()
        self.graphs = Graphs()
        for name, array in arrays.items():
            self.add_by_name(name, array.shape, array)
        self.built = True

    def call(self, inputs: Any, training: bool = False) -> tf.Tensor:
        return self.loss(*inputs, training=bool(training))

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> tf.Tensor:
        return tf.reduce_mean(y_pred)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "loss":
            super().__setattr__(name, value)
        elif value is not None:  # Keras sets None where compile gets no loss, which must not replace the method
            raise AttributeError(
                f"{type(self).__name__}: loss is a method that fit minimises, expected no other; call compile without "
                "loss=, and override compute_loss in a subclass for another one"
            )

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.variable_dtype, "config": vars(self.config) | {"folder": ""}}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        own = Config(**config["config"]).replace(folder="")
        return cls(own, {row.name: np.zeros(row.shape, config["dtype"]) for row in variables(own)}, name=config["name"])

    def runner(self, *, training: bool) -> tuple[Callable[..., Any], Any]:
        """See protocol.Model. The functions are graphs."""

        def run(function: Callable[..., Any], *tensors: Any, **options: Any) -> Any:
            tensors = tuple(tf.constant(value) if isinstance(value, int) else value for value in tensors)
            return self.graphs.run(self._call, *tensors, called=function, drops=training, **options)

        return run, self.weights[0]

    def _call(self, *tensors: Any, called: Callable[..., Any], drops: bool, **options: Any) -> Any:
        config, random = self.config, self.seed if drops else None
        p = Parameters(operations, self.tensors(), config.norm, eps=config.eps, random=random)
        return called(p, config, *tensors, **options)


@keras.saving.register_keras_serializable(package="rmsnorm")
class RNNSearch(Model, protocol.RNNSearch):
    """Nematus's attentional encoder-decoder: see rmsnorm.nematus.protocol.RNNSearch.

    Example:
        >>> config = Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3)
        >>> model = RNNSearch(config, {row.name: tf.zeros(row.shape) for row in variables(config)})
        >>> x, y = tf.constant([[[3], [2], [0]]]), tf.constant([[1], [0]])
        >>> model.loss(x, tf.ones((3, 1)), y, tf.ones((2, 1))).numpy()  # 2 log 3
        array([2.1972246], dtype=float32)
    """

    network: ClassVar[Any] = rnnsearch


@keras.saving.register_keras_serializable(package="rmsnorm")
class Transformer(Model, protocol.Transformer):
    """Nematus's Transformer: see rmsnorm.nematus.protocol.Transformer.

    Example:
        >>> sizes = {"embedding_size": 4, "state_size": 4, "source_vocab_sizes": (4,), "target_vocab_size": 3}
        >>> config = Config(**sizes, model_type="transformer", norm="rms", transformer_num_heads=2)
        >>> model = Transformer(config, {row.name: tf.zeros(row.shape) for row in variables(config)})
        >>> x, y = tf.constant([[[3], [2], [0]]]), tf.constant([[1], [0]])
        >>> model.loss(x, tf.ones((3, 1)), y, tf.ones((2, 1))).numpy()  # 2 log 3
        array([2.1972246], dtype=float32)
    """

    network: ClassVar[Any] = transformer
