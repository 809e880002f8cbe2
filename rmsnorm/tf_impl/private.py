"""What this package needs of TensorFlow and TensorFlow has no public function for.

A version of TensorFlow may lack such a private function. So each has a substitute, with which the results are the same
but take longer. Nothing else in this package imports ``tensorflow.python``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

import tensorflow as tf


def _private(module: str, name: str, otherwise: Any) -> Any:
    """What has this name in a module below ``tensorflow.python``."""
    with suppress(ImportError):
        return getattr(import_module(f"tensorflow.python.{module}"), name, otherwise)
    return otherwise


_record: Final = _private("eager.record", "record_operation", None)
_tangents: Final = _private("eager.forwardprop_util", "pack_tangents", None)
_is_in_xla: Final = _private("ops.control_flow_util", "GraphOrParentsInXlaContext", lambda graph: True)
_is_checked: Final = _private("framework.op_callbacks", "should_invoke_op_callbacks", lambda: False)
_wrap: Final = _private("ops.parallel_for.pfor", "wrap", None)

# Whether a tape or a ForwardAccumulator is open. If it is not known, gradients are operations, which have their own.
is_recording: Final[Callable[[], bool]] = _private("eager.record", "could_possibly_record", lambda: True)
# Whether the graph is traced for a SavedModel. If it is not known, gradients are as there.
is_saved: Final[Callable[[], bool]] = _private("saved_model.save_context", "in_save_context", lambda: True)


def record_gradient(
    y: tf.Tensor, tensors: Sequence[tf.Tensor], gradient: Callable[[tf.Tensor], list[tf.Tensor]]
) -> tf.Tensor:
    """y, with its gradient: as tf.custom_gradient, which takes ten times as long."""
    if not is_recording():
        return y
    if _record is None:
        return tf.custom_gradient(lambda *_: (y, gradient))(*tensors)
    _record("rms_norm", [y], list(tensors), gradient)
    return y


def takes_functions(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a graph may hold functions of the tensors in place of operations.

    It may not

    - where XLA compiles the whole graph,
    - where an open ForwardAccumulator has a tangent of one of the tensors: it differentiates operations only,
    - where tf.debugging checks every operation: XLA has no kernel for that,
    - in tf.data: there TensorFlow runs no other implementation in the place of a function,
    - where one of these is not known, or tf.vectorized_map cannot be told of the functions.
    """
    graph = tf.compat.v1.get_default_graph()
    if _wrap is None or _tangents is None or _is_in_xla(graph) or _is_checked() or _is_in_data(graph):
        return False
    return not any(_tangents(list(tensors)).indices)


def _is_in_data(graph: Any) -> bool:
    """Whether tf.data traces the graph or one around it, by the name that it gives to functions."""
    name, outer = getattr(graph, "name", ""), getattr(graph, "outer_graph", None)
    return name.startswith("Dataset") or (outer is not None and _is_in_data(outer))


def vectorize(tensor: tf.Tensor, convert: Callable[[Any], list[tuple[tf.Tensor, bool]]]) -> None:
    """Tells tf.vectorized_map what to make of this one operation; otherwise it asks for the kind of the operation.

    ``convert`` takes an object with the ``inputs`` and ``outputs`` of the operation, and returns for each output a
    tensor, and whether the first axis of that is the mapped one.
    """
    tensor.op.pfor_converter = lambda inputs: [_wrap(*result) for result in convert(inputs)]


# The type of tensors that are no part of a graph; None if it is not known, which is the type of no tensor then.
EAGER_TENSOR: Final[Any] = _private("framework.ops", "EagerTensor", None)
# The numbers of a tensor on the CPU as an array that shares its memory, which tf.Tensor.numpy copies. Without it no
# kernels are used.
numbers: Final[Callable[[tf.Tensor], Any] | None] = getattr(EAGER_TENSOR, "_numpy", None)
