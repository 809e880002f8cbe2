"""Configurations of the Keras layer, weights that show, and results within the bounds of the judge, on any backend."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import calls
import keras
import numpy as np
from keras import ops

import rmsnorm
from rmsnorm import numpy_impl as golden
from rmsnorm.accuracy.bounds import bound
from rmsnorm.accuracy.terms import term_sizes

MINE = rmsnorm.Variant(name="mine", eps=0.1, partial=Fraction(1, 3), scale_offset=0.5)
CONFIGURATIONS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "plain": ({}, (4, 6)),
    "unsorted": ({"axis": [-1, 1]}, (2, 3, 4, 5)),
    "image": ({"variant": "lasagne", "axis": (2, 3), "feature_axis": 1}, (2, 3, 4, 5)),
    "third": ({"partial": Fraction(1, 3)}, (4, 9)),
    "outside": ({"variant": "zhang_torch", "bias": True}, (4, 8)),
    "no weights": ({"scale": False}, (4, 8)),
    "own variant": ({"variant": MINE}, (4, 9)),
}


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def filled(layer: Any, shape: tuple[int, ...]) -> Any:
    """The layer, built, with weights that show."""
    if not layer.built:
        layer.build(shape)
    layer.set_weights([normal(*w.shape, seed=i + 1) for i, w in enumerate(layer.weights)])
    return layer


def to_numpy(x: Any) -> Any:
    """Exactly; a backend may not know how in bfloat16."""
    name = keras.backend.standardize_dtype(x.dtype)
    return keras.ops.convert_to_numpy(keras.ops.cast(x, "float64" if name == "float64" else "float32")).astype(name)


def weights_of(layer: Any) -> list[Any]:
    return [None if w is None else to_numpy(w.value) for w in (layer.scale, layer.bias)]


def options_of(layer: Any) -> dict[str, Any]:
    return {"variant": layer.variant, "axis": layer.axis, "feature_axis": layer.feature_axis}


def check(y: Any, layer: Any, x: Any) -> None:
    """A result of the layer; numbers below the normal ones of float32 are 0 on some backends."""
    calls.hold({"y": y}, x, *weights_of(layer), **options_of(layer), out_dtype=layer.compute_dtype, least=2.0**-126)


def judged_step(layer: Any, x: Any, **compiled: Any) -> Any:
    """One step along -1 of sum(target * y) / 16 in a model, whose gradient in y is exact: weights move by the golden's.

    Returns the model.
    """
    model = keras.Sequential([keras.Input(x.shape[1:]), layer])
    start = weights_of(filled(layer, (None, *x.shape[1:])))
    target = normal(*x.shape, seed=5).astype("bfloat16").astype("float16").astype(np.float32)
    model.compile(keras.optimizers.SGD(1.0), lambda t, y: ops.sum(t * ops.cast(y, t.dtype), -1), **compiled)
    model.fit(x, target, batch_size=16, epochs=1, verbose=0)
    x, upstream = x.astype(layer.compute_dtype), (target / 16).astype(layer.compute_dtype)
    gradients = golden.rms_norm_vjp(upstream, x, *start, **options_of(layer))[1:]
    terms = term_sizes(x, *start, dy=upstream, tangents=(x, None, None), **options_of(layer))
    call = calls.arguments(x, variant=layer.variant).call
    for name, old, new, gradient in zip(("dscale", "dbias"), start, weights_of(layer), gradients, strict=True):
        if old is not None:
            error = bound(name, call, "float32") * terms[name] + np.abs(new)  # and the subtraction
            assert (np.abs(new - (old - gradient)) <= 2.0**-24 * error).all(), (name, layer.compute_dtype, compiled)
            assert (np.abs(gradient) > 2.0**-10).any()
    return model
