"""The base class of RNNSearch and the Transformer: a Keras model that computes what a network of models/ describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from rmsnorm.nematus.models.parameters import Parameters
from rmsnorm.nematus.models.shell import Shell
from rmsnorm.nematus.tf import operations
from rmsnorm.nematus.tf.parameters import Graphs, Named

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


class NematusModel(Shell, Named, keras.Model):
    """A Keras model of batches (x, x_mask, y, y_mask), whose output is the loss of each sentence.

    ``compile`` takes no loss, because ``fit`` minimises the mean of the output. The batch is not the first axis: give
    ``fit`` whole batches, each in a tuple of its own, ((x, x_mask, y, y_mask),).
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
        return {"name": self.name, "dtype": self.variable_dtype, "config": dict(vars(self.config))}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        from rmsnorm.nematus.config import Config
        from rmsnorm.nematus.names import variables

        own = Config(**config["config"])
        return cls(own, {row.name: np.zeros(row.shape, config["dtype"]) for row in variables(own)}, name=config["name"])

    def encode(self, x: Any, x_mask: Any, *, training: bool = False) -> tf.Tensor:
        """See protocol.RNNSearch and protocol.Transformer."""
        return self.compute("encode", x, x_mask, training=training)

    def logits(self, x: Any, x_mask: Any, y: Any, *, training: bool = False) -> tf.Tensor:
        """See protocol.RNNSearch and protocol.Transformer."""
        return self.compute("logits", x, x_mask, y, training=training)

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any, *, training: bool = False) -> tf.Tensor:
        """See protocol.RNNSearch and protocol.Transformer."""
        return self.compute("loss", x, x_mask, y, y_mask, training=training)

    def runner(self, *, training: bool) -> tuple[Callable[..., Any], Any]:
        """See Shell. The functions are graphs."""

        def run(function: Callable[..., Any], *tensors: Any, **options: Any) -> Any:
            tensors = tuple(tf.constant(value) if isinstance(value, int) else value for value in tensors)
            return self.graphs.run(self._call, *tensors, called=function, drops=training, **options)

        return run, self.weights[0]

    def _call(self, *tensors: Any, called: Callable[..., Any], drops: bool, **options: Any) -> Any:
        config, random = self.config, self.seed if drops else None
        p = Parameters(operations, self.tensors(), config.norm, eps=config.eps, random=random)
        return called(p, config, *tensors, **options)
