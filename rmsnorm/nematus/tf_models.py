"""RNNSearch, the Transformer and the recurrent cells in Keras on TensorFlow: weights have the names of Nematus.

In a function with jit_compile=True the tape must be inside, as for all loops of TensorFlow.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial as bind
from typing import Any, ClassVar, Final

from rmsnorm.specification import errors
from rmsnorm.specification.frameworks import imported

with imported("tf"):
    import keras

    if keras.config.backend() != "tensorflow":
        raise errors.out_of_domain(
            "rmsnorm.nematus.tf_models", "the backend of Keras", keras.config.backend(),
            "'tensorflow', as these models need",
            "set KERAS_BACKEND=tensorflow before Python starts, or take the model for flax or torch",
        )  # fmt: skip
    import numpy as np
    import tensorflow as tf

    from rmsnorm.nematus import cells, protocol, tf_operations
    from rmsnorm.nematus.config import Config, Norm
    from rmsnorm.nematus.models.parameters import PARTIAL, Parameters
    from rmsnorm.nematus.names import variables

__all__ = ["RNNSearch", "Recurrent", "Transformer", "gru", "lstm"]


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

        def spec(tensor: tf.Tensor, exact: bool) -> tf.TensorSpec:
            is_sequence = tensor.shape.rank == 3 and tensor.dtype.is_floating  # its features are those of the model
            sizes = [*[None] * (tensor.shape.rank - is_sequence), *([tensor.shape[-1]] if is_sequence else [])]
            return tf.TensorSpec(tensor.shape if exact else sizes, tensor.dtype)

        specs = [tf.nest.map_structure(bind(spec, exact=isinstance(part, dict)), part) for part in tensors]
        key = (function.__name__, *map(str, specs), *options.items())
        if key not in self.traced:
            self.traced[key] = tf.function(bind(function, **options), input_signature=specs, autograph=False)
        return self.traced[key](*tensors)


class Model(protocol.Model, Named, keras.Model):
    """A Keras model of batches (x, x_mask, y, y_mask), whose output is the loss of each sentence.

    ``compile`` takes no loss, because ``fit`` minimises the mean of the output. The batch is not the first axis: give
    ``fit`` whole batches, each in a tuple of its own, ((x, x_mask, y, y_mask),). ``training=True`` turns dropout on.
    The weights have Nematus's names with dots for slashes.
    """

    operations: ClassVar[Any] = tf_operations

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
        p = Parameters(tf_operations, self.tensors(), config.norm, eps=config.eps, random=random)
        return called(p, config, *tensors, **options)


@keras.saving.register_keras_serializable(package="rmsnorm")
class RNNSearch(Model, protocol.RNNSearch):
    """Nematus's attentional encoder-decoder: see rmsnorm.nematus.protocol.RNNSearch."""


@keras.saving.register_keras_serializable(package="rmsnorm")
class Transformer(Model, protocol.Transformer):
    """Nematus's Transformer: see rmsnorm.nematus.protocol.Transformer."""


_graphs: Final = Graphs()


def _cell(function: Callable[..., Any], *arrays: Any, mask: Any = None, **options: Any) -> Any:
    """A cell as a graph, in which all arguments are tensors."""
    *states, parameters = arrays
    tensors = [tf.convert_to_tensor(array) for array in (*states, *(() if mask is None else (mask,)))]
    values = {name: tf.convert_to_tensor(value) for name, value in parameters.items()}

    def run(*tensors: Any, count: int, **options: Any) -> Any:
        *inputs, values = tensors
        own = {"mask": inputs[-1]} if len(inputs) > count else {}
        return function(tf_operations, *inputs[:count], values, **own, **options)

    run.__name__ = function.__name__
    return _graphs.run(run, *tensors, values, count=len(states), **options)


gru, lstm = bind(_cell, cells.gru), bind(_cell, cells.lstm)


@keras.saving.register_keras_serializable(package="rmsnorm")
class Recurrent(Named):
    """A layer of one of the authors' cells: see rmsnorm.nematus.cells. Sequences have the batch first.

    Example:
        >>> layer = Recurrent("lstm", 4, norm="rms")
        >>> [states.shape for states in layer(tf.zeros((2, 5, 3)), mask=tf.ones((2, 5)))]
        [TensorShape([2, 5, 4]), TensorShape([2, 5, 4])]
    """

    def __init__(
        self, kind: cells.Kind, units: int, *, norm: Norm = "none", partial: float = PARTIAL, **kwargs: Any
    ) -> None:
        cells.cell_shapes(kind, 1, units, norm)  # which says what is wrong with them
        super().__init__(**kwargs)
        self.kind, self.units = kind, units
        self.norms: dict[str, Any] = {"norm": norm, "partial": partial}
        self.supports_masking = True

    def build(self, input_shape: Any) -> None:
        seed = random.getrandbits(31)  # as keras.utils.set_random_seed seeds it
        parameters = cells.new_parameters(self.kind, input_shape[-1], self.units, self.norms["norm"], seed)
        for name, value in parameters.items():
            self.add_by_name(name, value.shape, value)

    def call(self, x: Any, *states: Any, mask: Any = None) -> Any:
        """The states (batch, length, units), of an LSTM (h, c). Without first states these are zeros."""
        x, mask = tf.transpose(x, (1, 0, 2)), None if mask is None else tf.transpose(tf.cast(mask, x.dtype))
        states = cells.first_states(self.kind, states, tf.zeros((tf.shape(x)[1], self.units), x.dtype))
        cell = lstm if self.kind == "lstm" else gru
        results = cell(x, *states, self.tensors(), mask=mask, **self.norms)
        return tf.nest.map_structure(lambda states: tf.transpose(states, (1, 0, 2)), results)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "kind": self.kind, "units": self.units, **self.norms}
