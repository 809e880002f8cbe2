"""Arrays of NumPy as tensors of TensorFlow, ways to derivatives, and results within the bounds of the judge."""

from __future__ import annotations

from typing import Any

import calls
import numpy as np
import tensorflow as tf

from rmsnorm.tf_impl import rms_norm

TINY = float(np.finfo(np.float32).tiny)  # TensorFlow's own operations take what is below as 0


def to_tf(value: Any) -> Any:
    return tf.constant(value) if isinstance(value, np.ndarray) else value


def check_bounds(got: dict[str, Any], x: Any, scale: Any = None, bias: Any = None, **options: Any) -> None:
    """``got`` has some of y, inverse_rms, dx, dscale and dbias; the options are those of rms_norm, and dy."""
    calls.hold({name: np.asarray(value) for name, value in got.items()}, x, scale, bias, least=TINY, **options)


def gradients_of(function: Any, arrays: Any, v: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        y = function(*arrays)
    return tape.gradient(y, arrays, v)


def in_a_graph(function: Any, arrays: Any, v: Any) -> Any:
    return tf.function(lambda arrays, v: gradients_of(function, arrays, v))(arrays, v)


def in_a_compiled_graph(function: Any, arrays: Any, v: Any) -> Any:
    return tf.function(lambda arrays, v: gradients_of(function, arrays, v), jit_compile=True)(arrays, v)


def around_a_graph(function: Any, arrays: Any, v: Any) -> Any:
    """What crosses from the forward to the backward graph is what the function says."""
    signature = [tf.TensorSpec([None] * array.shape.rank, array.dtype) for array in arrays]
    return gradients_of(tf.function(function, input_signature=signature), arrays, v)


def by_tf_gradients(function: Any, arrays: Any, v: Any) -> Any:
    """By tf.gradients, which needs a graph."""
    return tf.function(lambda arrays, v: tf.gradients(function(*arrays), arrays, v))(arrays, v)


GRAPHS = (in_a_graph, in_a_compiled_graph, around_a_graph, by_tf_gradients)


def with_gradients(x: Any, dy: Any, *parameters: Any, **options: Any) -> list[Any]:
    """y of rms_norm, and the gradients of x and the parameters."""
    leaves = [x, *parameters]
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        y = rms_norm(*leaves, **options)
    return [y, *tape.gradient(y, leaves, dy)]


def forward_mode(function: Any, arrays: Any, directions: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(arrays, directions) as accumulator:
        y = function(*arrays)
    return accumulator.jvp(y)
