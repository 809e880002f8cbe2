"""What the recurrent models and the Transformer are made of: parameters by name, the norm, and projections."""

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
    """A layer or model with weights by names with slashes, as ``gru0/state_to_gates``; Keras has dots for them."""

    def add_by_name(self, name: str, shape: Any, initializer: Any) -> None:
        name = name.replace("/", ".")
        # An attribute, because these are what tf.train.Checkpoint and SavedModel follow.
        setattr(self, name, self.add_weight(shape=shape, initializer=initializer, name=name))

    def by_name(self) -> dict[str, keras.Variable]:
        return {weight.name.replace(".", "/"): weight for weight in self.weights}

    def tensors(self) -> dict[str, tf.Tensor]:
        """Read once, not in every step of a loop; in the compute dtype where Keras casts."""
        return {name: tf.convert_to_tensor(weight) for name, weight in self.by_name().items()}

    def save_own_variables(self, store: Any) -> None:
        for weight in self.by_name().values():
            store[weight.name] = weight.numpy()

    def load_own_variables(self, store: Any) -> None:
        weights = {weight.name: weight for weight in self.by_name().values()}
        if weights.keys() != set(store.keys()):
            missing, extra = (sorted(each) for each in (weights.keys() - store.keys(), store.keys() - weights.keys()))
            raise ValueError(
                f"{self.name}: the file lacks {missing[:1]} and holds {extra[:1]} instead, expected the weights by "
                "their names; is it the file of another model?"
            )
        for name, weight in weights.items():
            weight.assign(store[name])


class Graphs:
    """Functions of tensors, as graphs of their own in eager mode; in another graph they become part of it.

    Each is traced once for all lengths and batches: again only for other dtypes, numbers of axes or options, and for
    parameters in a dictionary of other names or shapes.
    """

    def __init__(self) -> None:
        self.traced: dict[Any, Any] = {}

    def run(self, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
        if not tf.executing_eagerly():
            return function(*given, **options)
        specs = [_exact(each) if isinstance(each, dict) else _relaxed(each) for each in given]
        key = (function.__name__, *map(str, specs), *options.items())
        if key not in self.traced:
            self.traced[key] = tf.function(bind(function, **options), input_signature=specs, autograph=False)
        return self.traced[key](*given)


def _exact(parameters: dict[str, tf.Tensor]) -> dict[str, tf.TensorSpec]:
    return {name: tf.TensorSpec(value.shape, value.dtype) for name, value in parameters.items()}


def _relaxed(value: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec([None] * value.shape.rank, value.dtype)


class Dropout:
    """Nematus's dropout after Gal & Ghahramani: one mask for each name, the same at every step of a sequence.

    The masks are drawn at once: what is drawn inside a loop is drawn anew in every step.

    rates, sizes: by name, of what has a mask; ``sizes`` is how many features.
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
        """Drop features of x in all steps; ``whole``: all features in some steps."""
        if not self.rates[name]:
            return x
        if whole:
            return keras.random.dropout(x, self.rates[name], (None, None, 1), self.seed)
        return x * self.masks[name]


class Parameters:
    """Tensors below a name.

    ``parameters / "gru0"`` is what lies below that name, ``parameters["W"]`` a tensor. The norm of the model is carried
    along, and in training its dropout: ``drop("W", x)`` is what is left of the input x of W.
    """

    def __init__(
        self,
        values: Mapping[str, tf.Tensor],
        norm: CellNorm = "none",
        *,
        partial: float = PARTIAL,
        dropout: Dropout | None = None,
        scope: str = "",
    ) -> None:
        check_norm(norm)
        self.values, self.norm, self.partial, self.dropout, self.scope = values, norm, partial, dropout, scope

    def __truediv__(self, name: str) -> Parameters:
        return Parameters(
            self.values, self.norm, partial=self.partial, dropout=self.dropout, scope=f"{self.scope}{name}/"
        )

    def __getitem__(self, name: str) -> tf.Tensor:
        return self.values[self.scope + name]

    def get(self, name: str) -> tf.Tensor | None:
        return self.values.get(self.scope + name)

    def drop(self, name: str, x: tf.Tensor, *, whole: bool = False) -> tf.Tensor:
        return x if self.dropout is None else self.dropout(self.scope + name, x, whole=whole)


def normalize(p: Parameters, a: tf.Tensor, gain: str, offset: str) -> tf.Tensor:
    """The norm over the last axis: a / sqrt(mean(a^2) + eps) * gain + offset; of a - mean(a) for LayerNorm."""
    if p.norm == "none":
        return a
    if p.norm == "layer":
        return _layer_norm(a, p[gain], p.get(offset))
    return rms_norm(a, p[gain], p.get(offset), variant="nematus", partial=p.partial if p.norm == "prms" else None)


def _layer_norm(a: tf.Tensor, gain: tf.Tensor, offset: tf.Tensor | None) -> tf.Tensor:
    """In at least float32."""
    wide = a.dtype if a.dtype == tf.float64 else tf.float32
    c = tf.cast(a, wide)
    c -= tf.reduce_mean(c, -1, keepdims=True)
    y = c * tf.math.rsqrt(tf.reduce_mean(tf.square(c), -1, keepdims=True) + EPS) * tf.cast(gain, wide)
    return tf.cast(y if offset is None else y + tf.cast(offset, wide), a.dtype)


def multiply(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """x W, as one product of matrices: TensorFlow's own would be one for every step."""
    if x.shape.rank == 2:
        return x @ w
    y = tf.reshape(x, (-1, tf.shape(w)[0])) @ w
    return tf.reshape(y, (*tf.unstack(tf.shape(x))[:-1], w.shape[1]))


def project(p: Parameters, x: tf.Tensor, weight: str, bias: str | None, norm: tuple[str, str] | None) -> tf.Tensor:
    """norm(x W + b), with b inside the norm; without a bias or a norm where these are None."""
    a = multiply(p.drop(weight, x), p[weight])
    if bias is not None:
        a = a + p[bias]
    return a if norm is None else normalize(p, a, *norm)


def feed_forward(p: Parameters, x: tf.Tensor, *, norm: bool = True) -> tf.Tensor:
    """norm(x W + b), the norm's variables directly below the name of the layer."""
    return project(p, x, "W", "b", leaves(p) if norm else None)


def leaves(p: Parameters, scope: str = "") -> tuple[str, str]:
    """What Nematus calls gain and offset of the norm below that scope."""
    return cells.leaves(p.norm, scope)
