"""Arrays of NumPy as tensors of TensorFlow, and the ways to call a function of tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import options
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


make = partial(options.make, limit=1.0)  # 1e4 stays in float16


def to_tf(value: Any) -> Any:
    return tf.constant(value) if isinstance(value, np.ndarray) else value


def split(arguments: dict[str, Any]) -> tuple[list[str], list[Any], dict[str, Any]]:
    """Names and values of the arrays among the options, and the rest."""
    names = [name for name, value in arguments.items() if isinstance(value, np.ndarray)]
    rest = {name: value for name, value in arguments.items() if name not in names}
    if "out_dtype" in rest:
        rest["out_dtype"] = getattr(tf, rest["out_dtype"])
    return names, [to_tf(arguments[name]) for name in names], rest


def converted(arguments: dict[str, Any]) -> dict[str, Any]:
    names, arrays, rest = split(arguments)
    return {**rest, **dict(zip(names, arrays, strict=True))}
