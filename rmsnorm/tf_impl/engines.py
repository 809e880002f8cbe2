"""Which engine computes a call, and the call itself. Nothing else decides that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, Final

import tensorflow as tf

from rmsnorm.cpu.prepared import Prepared
from rmsnorm.specification.absent import filled, without_none
from rmsnorm.specification.call import Call
from rmsnorm.tf_impl import graph, kernels, operations
from rmsnorm.tf_impl.private import is_recording, record_gradient

_LARGE: Final = 2**20  # elements: below, to compile another size takes as long as a hundred calls by operations


class Engine(Enum):
    """What computes a call."""

    KERNELS = "kernels"  # those of rmsnorm.cpu
    COMPILED = "operations that XLA compiles"
    FUNCTION = "a function in a graph"  # which XLA compiles where TensorFlow runs the graph
    OPERATIONS = "operations of TensorFlow"


def engine_of(
    prepared: Prepared, tensors: Iterable[tf.Tensor | None], is_recorded: bool = False, is_mixed: bool = False
) -> tuple[Engine, str | None]:
    """The engine, and why it is not the kernels; None if it is.

    Args:
        is_recorded: somebody may differentiate the results again, and only operations have derivatives.
        is_mixed: the gradient of x + residual is wanted in another dtype than its own.
    """
    if not tf.executing_eagerly():
        engine = Engine.FUNCTION if graph.may_hold_functions(tensors) else Engine.OPERATIONS
        return engine, "a graph is computed by operations, which XLA compiles"
    if is_recorded:
        return Engine.OPERATIONS, "a derivative of the gradients may be wanted"
    if is_mixed:
        return Engine.OPERATIONS, "the gradient of x and that of the residual have different dtypes"
    is_readable = kernels.are_readable(tensors)
    reason = prepared.in_memory()[1] if is_readable else "an array is not in the memory of a CPU as it is"
    if reason is None:
        return Engine.KERNELS, None
    is_compiled = math.prod(prepared.call.shape) >= _LARGE and graph.uses_xla()
    return Engine.COMPILED if is_compiled else Engine.OPERATIONS, reason


def why_not(prepared: Prepared, arrays: Iterable[Any]) -> str | None:
    """Why no kernel computes a call with these arrays; None if one does."""
    return engine_of(prepared, arrays)[1]


def forward(
    prepared: Prepared, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None,
    gate: tf.Tensor | None, with_inverse_rms: bool,
) -> tuple[tf.Tensor, tf.Tensor | None]:  # fmt: skip
    """y with derivatives of every order, and 1 / rho, which may be None if it is not asked for."""
    call, tensors = prepared.call, (h, scale, bias, mask, gate)
    engine, _ = engine_of(prepared, tensors)
    if not tf.executing_eagerly():
        norm = graph.forward if engine is Engine.FUNCTION else _with_gradient
        return norm(call, *tensors[:4]) if gate is None else operations.gated(call, norm, *tensors)
    inverse_rms: tf.Tensor | None
    if engine is Engine.KERNELS:
        y, inverse_rms = kernels.forward(prepared, *tensors, with_inverse_rms or is_recording())
    else:
        y, inverse_rms = _run(engine, operations.forward, call, tensors)

    def gradient(dy: Any) -> list[tf.Tensor]:
        return without_none(gradients(prepared, tf.convert_to_tensor(dy), *tensors, inverse_rms))

    return record_gradient(y, without_none([h, scale, bias, gate]), gradient), inverse_rms


def gradients(
    prepared: Prepared, dy: tf.Tensor, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None,
    mask: tf.Tensor | None, gate: tf.Tensor | None, inverse_rms: tf.Tensor | None = None, dh: tf.Tensor | None = None,
    is_mixed: bool = False,
) -> list[tf.Tensor | None]:  # fmt: skip
    """dx + dh, dscale, dbias and dgate, each in the dtype of its tensor; the first not rounded if ``is_mixed``."""
    call, tensors = prepared.call, (dy, h, scale, bias, mask, gate, inverse_rms, dh)
    is_graph, is_recorded = not tf.executing_eagerly(), is_recording()
    engine, _ = engine_of(prepared, tensors, is_recorded, is_mixed)
    if engine is Engine.KERNELS:
        return kernels.backward(prepared, *tensors)
    if is_graph and gate is None and inverse_rms is not None:  # the derivative of an eager call
        return [*graph.backward(call, dy, h, scale, bias, mask, inverse_rms), None]
    if is_graph or is_recorded or is_mixed:
        if inverse_rms is not None:  # a constant; with a gate it may be that of h * f(z), which is computed again
            inverse_rms = None if gate is not None else operations.recalled(call, h, mask, inverse_rms)
        return operations.gradients(call, dy, h, scale, bias, mask, gate, inverse_rms, dh, is_mixed)
    results: list[tf.Tensor | None] = _run(engine, operations.gradients, call, tensors)
    return results


def _run(engine: Engine, function: Callable[..., Any], call: Call, tensors: Iterable[tf.Tensor | None]) -> Any:
    """The function of constants: a tape would keep every tensor, though no gradient goes through them."""
    constants = [None if t is None else tf.stop_gradient(t) for t in tensors]
    if engine is Engine.COMPILED:
        return graph.compiled(function, *graph.signature(call, constants))(*without_none(constants))
    return function(call, *constants)


def _with_gradient(
    call: Call, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """y and 1 / rho by operations in a graph, with our gradient in place of TensorFlow's."""

    @tf.custom_gradient
    def function(*tensors: tf.Tensor) -> Any:
        y, inverse_rms = operations.forward(call, *[*filled(tensors, [h, scale, bias]), mask])

        def gradient(dy: Any, _: Any) -> list[tf.Tensor]:
            dy = tf.convert_to_tensor(dy)
            return without_none(operations.gradients(call, dy, h, scale, bias, mask, None, inverse_rms))

        return (y, inverse_rms), gradient

    y, inverse_rms = function(*without_none([h, scale, bias]))
    return y, inverse_rms
