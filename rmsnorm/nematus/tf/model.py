"""The base class of RNNSearch and the Transformer: a Keras model of batches of sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from rmsnorm.nematus.tf import sentences
from rmsnorm.nematus.tf.parameters import Graphs, Named, Parameters

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


class NematusModel(Named, keras.Model):
    """A Keras model of batches (x, x_mask, y, y_mask), whose output is the loss of each sentence.

    ``compile`` takes no loss, because ``fit`` minimises the mean of the output. The batch is not the first axis: give
    ``fit`` whole batches, each in a tuple of its own, ((x, x_mask, y, y_mask),).
    """

    def __init__(self, config: Config, parameters: Mapping[str, Any], **kwargs: Any) -> None:
        arrays = {name: np.asarray(parameters[name]) for name in sorted(parameters)}
        super().__init__(dtype=next(iter(arrays.values())).dtype.name, **kwargs)
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
        return {"name": self.name, "dtype": self.variable_dtype, "config": dict(vars(self.config))}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        from rmsnorm.nematus.config import Config
        from rmsnorm.nematus.names import variables

        own = Config(**config["config"])
        return cls(own, {row.name: np.zeros(row.shape, config["dtype"]) for row in variables(own)}, name=config["name"])

    def parameters_in(self, batch: tf.Tensor, training: bool) -> Parameters:
        """The parameters as tensors, with dropout in training; ``batch`` is the number of sentences."""
        raise NotImplementedError

    def run(self, function: Callable[..., Any], *tensors: Any, training: bool = False, **options: Any) -> Any:
        """function(parameters, config, *tensors, **options) as a graph; the last axis of the first one is the batch."""
        return self.graphs.run(self._call, *tensors, called=function, training=training, **options)

    def _call(self, *tensors: Any, called: Callable[..., Any], training: bool, **options: Any) -> Any:
        batch = tf.shape(tensors[0])[-1] if training else None
        return called(self.parameters_in(batch, training), self.config, *tensors, **options)

    def source(self, op: str, x: Any, x_mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Ids and mask of the source."""
        return sentences.source(op, x, x_mask, self.config, self.variable_dtype)

    def sentences(
        self, op: str, x: Any, x_mask: Any, y: Any, y_mask: Any = None
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """Ids and masks of the source and of the target."""
        ids, mask = self.source(op, x, x_mask)
        words = sentences.target(op, y, ids.shape[2], self.config, self.variable_dtype, y_mask)
        return ids, mask, *words
