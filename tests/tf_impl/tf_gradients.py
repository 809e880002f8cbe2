"""The ways to the derivatives of rms_norm in TensorFlow, first and second."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from rmsnorm.tf_impl import rms_norm


def by_tape(dy: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        y = rms_norm(*arrays, **options)
        y = y[0] if isinstance(y, tuple) else y
    return tape.gradient(y, arrays, tf.cast(dy, y.dtype))


def by_graph(dy: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    return tf.function(lambda dy, arrays: by_tape(dy, arrays, options))(dy, arrays)


def by_compiled_graph(dy: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    return tf.function(lambda dy, arrays: by_tape(dy, arrays, options), jit_compile=True)(dy, arrays)


def by_tape_outside(dy: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    """What crosses from the forward to the backward graph is what the function says."""

    def first(*arrays: Any) -> Any:
        y = rms_norm(*arrays, **options)
        return y[0] if isinstance(y, tuple) else y

    function = tf.function(first, input_signature=[tf.TensorSpec([None] * a.shape.rank, a.dtype) for a in arrays])
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        y = function(*arrays)
    return tape.gradient(y, arrays, tf.cast(dy, y.dtype))


def by_gradients(dy: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    """tf.gradients, which needs a graph."""

    def derived(dy: Any, arrays: Any) -> Any:
        y = rms_norm(*arrays, **options)
        y = y[0] if isinstance(y, tuple) else y
        return tf.gradients(y, arrays, tf.cast(dy, y.dtype))

    return tf.function(derived)(dy, arrays)


GRAPHS = (by_graph, by_compiled_graph, by_tape_outside, by_gradients)


def forward_mode(arrays: list[Any], directions: list[Any], options: dict[str, Any]) -> Any:
    with tf.autodiff.ForwardAccumulator(arrays, directions) as accumulator:
        y = rms_norm(*arrays, **options)
        y = y[0] if isinstance(y, tuple) else y
    return accumulator.jvp(y)


def gradients_of(function: Any, arrays: Any, v: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        y = function(*arrays)
    return tape.gradient(y, arrays, v)


def backward_over_backward(function: Any, arrays: Any, v: Any, directions: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        first = gradients_of(function, arrays, v)
    return tape.gradient(first, arrays, directions, unconnected_gradients="zero")


def forward_over_backward(function: Any, arrays: Any, v: Any, directions: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(arrays, directions) as accumulator:
        first = gradients_of(function, arrays, v)
    return accumulator.jvp(first, unconnected_gradients="zero")


def backward_over_forward(function: Any, arrays: Any, v: Any, directions: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        with tf.autodiff.ForwardAccumulator(arrays, directions) as accumulator:
            y = function(*arrays)
        tangent = accumulator.jvp(y)
    return tape.gradient(tangent, arrays, v, unconnected_gradients="zero")


def forward_over_forward(function: Any, arrays: Any, v: Any, directions: Any) -> Any:
    """The second derivative along the directions alone."""
    with (
        tf.autodiff.ForwardAccumulator(arrays, directions) as outer,
        tf.autodiff.ForwardAccumulator(arrays, directions) as inner,
    ):
        tangent = tf.reduce_sum(v * inner.jvp(function(*arrays)))
    return outer.jvp(tangent)


NESTINGS = (backward_over_backward, forward_over_backward, backward_over_forward)
