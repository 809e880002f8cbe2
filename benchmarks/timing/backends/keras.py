"""The layers that Keras runs on each of its backends. Keras reads its backend once, when it is imported."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from rmsnorm.specification.variants import PRESETS, Variant
from timing.candidates import BUILTIN, LAYER_NORM, OURS
from timing.problem import Problem


def start(backend: str) -> str:
    """Import Keras on a backend, and return its version."""
    os.environ["KERAS_BACKEND"] = backend
    return f"Keras {import_module('keras').__version__}"


def layers(problem: Problem, variant: Variant) -> dict[str, tuple[Any, Variant | None]]:
    """The layers with the gain of the problem, by kind, and the variant of each."""
    import keras

    from rmsnorm.tf_impl import RMSNormalization

    made: dict[str, tuple[Any, Variant | None]] = {
        OURS: (RMSNormalization(variant=variant, bias=False, dtype=problem.dtype), variant)
    }
    if hasattr(keras.layers, "RMSNormalization"):  # since Keras 3.9
        made[BUILTIN] = keras.layers.RMSNormalization(dtype=problem.dtype), PRESETS["keras"]
    made[LAYER_NORM] = keras.layers.LayerNormalization(dtype=problem.dtype), None
    for layer, _ in made.values():
        layer.build(problem.x.shape)
        layer.set_weights([problem.scale, *layer.get_weights()[1:]])
    return made
