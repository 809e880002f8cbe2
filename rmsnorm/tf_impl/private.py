"""What this package needs of TensorFlow and TensorFlow has no public function for.

A version of TensorFlow may lack such a private function. So each has a substitute, with which the results are the same,
or those of the recipe, but take longer. Nothing else in this package imports ``tensorflow.python``.
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

# Whether a tape or a ForwardAccumulator is open. If it is not known, gradients are operations, which have their own.
is_recording: Final[Callable[[], bool]] = _private("eager.record", "could_possibly_record", lambda: True)


def record_gradient(results: list[tf.Tensor], tensors: Sequence[tf.Tensor], gradient: Callable[..., Any]) -> Any:
    """The results, with their gradient: as tf.custom_gradient, which takes ten times as long."""
    if not is_recording():
        return results
    if _record is None:
        return tf.custom_gradient(lambda *_: (results, gradient))(*tensors)
    _record("rms_norm", results, list(tensors), gradient)
    return results


def has_tangents(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a ForwardAccumulator is open that has a tangent of one of the tensors. No if that is not known."""
    return _tangents is not None and is_recording() and bool(any(_tangents(list(tensors)).indices))


def may_be_exported() -> bool:
    """Whether operations are traced for a graph that TensorFlow itself runs, or another program: not for XLA."""
    return not tf.executing_eagerly() and not _is_in_xla(tf.compat.v1.get_default_graph())


# The type of tensors that are no part of a graph; None if it is not known, which is the type of no tensor then.
EAGER_TENSOR: Final[Any] = _private("framework.ops", "EagerTensor", None)
# The numbers of a tensor on the CPU as an array that shares its memory, which tf.Tensor.numpy copies. Without it no
# kernels are used.
numbers: Final[Callable[[tf.Tensor], Any] | None] = getattr(EAGER_TENSOR, "_numpy", None)
