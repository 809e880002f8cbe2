"""What TensorFlow has no public function for: its tapes, its contexts and its tf.vectorized_map.

Nothing else in this package imports ``tensorflow.python``. A version of TensorFlow that lacks one of these fails when
this is imported, and not with other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import forwardprop_util, record
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.parallel_for import pfor
from tensorflow.python.saved_model import save_context


def is_recording() -> bool:
    """Whether a tape or a ForwardAccumulator is open."""
    return bool(record.could_possibly_record())


def record_gradient(
    y: tf.Tensor, tensors: Sequence[tf.Tensor], gradient: Callable[[tf.Tensor], list[tf.Tensor]]
) -> None:
    """As tf.custom_gradient, which takes ten times as long."""
    if is_recording():
        record.record_operation("rms_norm", [y], list(tensors), gradient)


def is_in_accumulator(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether an open ForwardAccumulator has a tangent of one of the tensors."""
    return any(forwardprop_util.pack_tangents(list(tensors)).indices)


def is_compiled_by_xla() -> bool:
    """Whether XLA compiles all of the graph that is traced."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def is_saved() -> bool:
    """Whether the graph is traced for a SavedModel."""
    return bool(save_context.in_save_context())


def vectorize(tensor: tf.Tensor, convert: Callable[[Any], list[tuple[tf.Tensor, bool]]]) -> None:
    """Says what tf.vectorized_map makes of one operation: its register of conversions is by kinds of operations.

    ``convert`` takes an object with the ``inputs`` and ``outputs`` of the operation, and returns for each output a
    tensor, and whether the first axis of that is the mapped one.
    """
    tensor.op.pfor_converter = lambda inputs: [pfor.wrap(*result) for result in convert(inputs)]
