"""Arrays of NumPy as tensors of TensorFlow, and the ways to call a function of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

MODES: dict[str, Callable[[Any], Any]] = {
    "eager": lambda function: function,
    "graph": tf.function,
    "unknown sizes": lambda function: _unknown(function, False),
    "compiled": lambda function: tf.function(function, jit_compile=True),
    "compiled, unknown sizes": lambda function: _unknown(function, True),
}


def _unknown(function: Any, jit_compile: bool) -> Any:
    """The function of one list of tensors, traced for sizes that are not known."""

    def run(tensors: Any) -> Any:
        signature = [[tf.TensorSpec([None] * t.shape.rank, t.dtype) for t in tensors]]
        return tf.function(function, input_signature=signature, jit_compile=jit_compile)(tensors)

    return run


def to_tf(value: Any) -> Any:
    return tf.constant(value) if isinstance(value, np.ndarray) else value


def converted(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: to_tf(value) for name, value in arguments.items()}
