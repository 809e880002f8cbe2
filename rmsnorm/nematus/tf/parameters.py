"""The parts of the recurrent models and the Transformer: parameters by name, the norm, and projections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial as bind
from typing import Any

import keras
import tensorflow as tf

from rmsnorm.nematus import cells
from rmsnorm.nematus.cells import EPS, PARTIAL, CellNorm, check_norm
from rmsnorm.tf_impl.functional import rms_norm


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
    return tf.TensorSpec([None] * tensor.shape.rank, tensor.dtype)


class Dropout:
    """Nematus's dropout after Gal & Ghahramani: one mask for each name, the same in all steps of a sequence.

    All masks are drawn at the start, because TensorFlow draws again in every step of a loop.

    Args:
        rates: dropout rates by the names of the masks.
        sizes: numbers of features by the names of the masks.
    """

    def __init__(
        self, rates: Mapping[str, float], sizes: Mapping[str, int], batch: Any, dtype: tf.DType, seed: Any
    ) -> None:
        self.rates, self.seed = rates, seed
        self.masks = {
            name: keras.random.dropout(tf.ones((batch, size), dtype), rates[name], seed=seed)
            for name, size in sizes.items()
            if rates[name]
        }

    def __call__(self, name: str, x: tf.Tensor, *, whole: bool = False) -> tf.Tensor:
        """Drop some features of x in all steps; with ``whole``, all features in some steps."""
        if not self.rates[name]:
            return x
        if whole:
            return keras.random.dropout(x, self.rates[name], (None, None, 1), self.seed)
        return x * self.masks[name]


class Parameters:
    """Tensors below a name.

    ``parameters / "gru0"`` are the tensors below that name, ``parameters["W"]`` is a tensor. The object also has the
    norm of the model and, in training, its dropout: ``drop("W", x)`` applies the mask of W to x, the input of W.
    """

    def __init__(
        self,
        values: Mapping[str, tf.Tensor],
        norm: CellNorm = "none",
        *,
        partial: float = PARTIAL,
        eps: float = EPS,
        dropout: Dropout | None = None,
        scope: str = "",
    ) -> None:
        check_norm(norm)
        self.values, self.norm, self.partial, self.eps = values, norm, partial, eps
        self.dropout, self.scope = dropout, scope

    def __truediv__(self, name: str) -> Parameters:
        return Parameters(
            self.values, self.norm, partial=self.partial, eps=self.eps, dropout=self.dropout,
            scope=f"{self.scope}{name}/",
        )  # fmt: skip

    def __getitem__(self, name: str) -> tf.Tensor:
        return self.values[self.scope + name]

    def get(self, name: str) -> tf.Tensor | None:
        return self.values.get(self.scope + name)

    def drop(self, name: str, x: tf.Tensor, *, whole: bool = False) -> tf.Tensor:
        return x if self.dropout is None else self.dropout(self.scope + name, x, whole=whole)


def normalise(p: Parameters, x: tf.Tensor, gain: str, offset: str | None, norm: CellNorm | None = None) -> tf.Tensor:
    """The norm over the last axis: x / sqrt(mean(x^2) + eps) * gain + offset; LayerNorm takes x - mean(x) as x.

    norm: by default that of the model.
    """
    norm = norm or p.norm
    if norm == "none":
        return x
    bias = None if offset is None else p.get(offset)
    if norm == "layer":
        return _layer_norm(x, p[gain], bias, p.eps)
    partial = p.partial if norm == "prms" else None
    return rms_norm(x, p[gain], bias, variant="nematus", eps=p.eps, partial=partial)


def _layer_norm(x: tf.Tensor, gain: tf.Tensor, offset: tf.Tensor | None, eps: float) -> tf.Tensor:
    """LayerNorm, computed in at least float32."""
    wide = x.dtype if x.dtype == tf.float64 else tf.float32
    centred = tf.cast(x, wide)
    centred -= tf.reduce_mean(centred, -1, keepdims=True)
    y = centred * tf.math.rsqrt(tf.reduce_mean(tf.square(centred), -1, keepdims=True) + eps) * tf.cast(gain, wide)
    return tf.cast(y if offset is None else y + tf.cast(offset, wide), x.dtype)


def multiply(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """x W as one product of matrices; TensorFlow's own operator makes one product for each step."""
    if x.shape.rank == 2:
        return x @ w
    y = tf.reshape(x, (-1, tf.shape(w)[0])) @ w
    return tf.reshape(y, (*tf.unstack(tf.shape(x))[:-1], w.shape[1]))


def project(p: Parameters, x: tf.Tensor, weight: str, bias: str | None, norm: tuple[str, str] | None) -> tf.Tensor:
    """norm(x W + b), with b inside the norm; a bias or a norm of None is left out."""
    y = multiply(p.drop(weight, x), p[weight])
    if bias is not None:
        y = y + p[bias]
    return y if norm is None else normalise(p, y, *norm)


def feed_forward(p: Parameters, x: tf.Tensor, *, norm: bool = True) -> tf.Tensor:
    """norm(x W + b); the variables of the norm are directly below the name of the layer."""
    return project(p, x, "W", "b", leaves(p) if norm else None)


def leaves(p: Parameters, scope: str = "") -> tuple[str, str]:
    """Nematus's names of the gain and the offset of the norm below a scope."""
    return cells.leaves(p.norm, scope)
