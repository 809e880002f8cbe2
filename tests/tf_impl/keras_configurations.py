"""Configurations of the Keras layer, and layers with weights that show."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

import rmsnorm

CONFIGURATIONS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "plain": ({}, (4, 6)),
    "middle axis": ({"axis": 1}, (2, 3, 4)),
    "first axis": ({"axis": 0}, (3, 4)),
    "unsorted": ({"axis": [-1, 1]}, (2, 3, 4, 5)),
    "image": ({"variant": "lasagne", "axis": (2, 3), "feature_axis": 1}, (2, 3, 4, 5)),
    "partial": ({"variant": "gemma", "partial": 0.3}, (4, 8)),
    "third": ({"partial": Fraction(1, 3)}, (4, 9)),
    "outside": ({"variant": "zhang_torch", "bias": True}, (4, 8)),
    "clamp": ({"variant": "x_transformers"}, (4, 8)),
    "before scale": ({"variant": "llama", "epsilon": 1e-3}, (4, 8)),
    "no scale": ({"scale": False, "bias": True}, (4, 8)),
    "no weights": ({"scale": False}, (4, 8)),
    "own variant": (
        {"variant": rmsnorm.Variant(name="mine", eps=0.1, partial=Fraction(1, 3), scale_offset=0.5)},
        (4, 9),
    ),
}


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def filled(layer: Any, shape: tuple[int, ...]) -> Any:
    """The layer, built, with weights that show."""
    if not layer.built:
        layer.build(shape)
    layer.set_weights([normal(*w.shape, seed=i + 1) for i, w in enumerate(layer.weights)])
    return layer
