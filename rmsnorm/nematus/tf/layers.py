"""RMSNorm with the interface of Nematus's layers.py, for its graphs and for eager code.

To use it in a checkout of Nematus, replace the class in layers.py with an import,

    from rmsnorm.nematus.tf.layers import LayerNormLayer

Nematus then trains the RMSNorm of the paper, and reads and writes the checkpoints of the authors' patched Nematus.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from rmsnorm.specification import errors
from rmsnorm.specification.variants import check_eps
from rmsnorm.tf_impl.functional import rms_norm

__all__ = ["LayerNormLayer", "RMSNormLayer"]


class RMSNormLayer(tf.Module):
    """Nematus's RMSNormLayer.

        y = x / sqrt(mean(x_i^2) + eps) * scale

    The variable is made as in Nematus's class: in a variable scope with get_variable, shared if the scope says so; in a
    name scope, or eagerly, with tf.Variable. In both cases its name starts with the names of the scopes.

    Args:
        layer_size: the size of the last axis of x.
        eps: a number >= 0.

    Attributes:
        scale: gain, (layer_size,), float32, initially 1.

    Raises:
        TypeError, ValueError: layer_size or eps is out of its domain.

    Source: Nematus master, layers.py.

    Example:
        >>> import tensorflow as tf
        >>> RMSNormLayer(2, eps=0.0).forward(tf.constant([[3.0, 4.0]])).numpy().round(4)
        array([[0.8485, 1.1314]], dtype=float32)
    """

    _gain = "scale"

    def __init__(self, layer_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        op = type(self).__name__
        check_eps(op, eps)
        if not isinstance(layer_size, int) or layer_size < 1:
            raise errors.out_of_domain(op, "layer_size", layer_size, "an integer >= 1", "pass that of the last axis")
        self.layer_size, self.eps = layer_size, eps
        setattr(self, self._gain, _variable(self._gain, layer_size))

    def forward(self, x: Any, input_is_3d: bool = False) -> Any:
        """Normalise x over its last axis.

        Args:
            x: floating-point, (..., layer_size).
            input_is_3d: whether x has 3 axes or 2, if the graph does not know their number.

        Returns:
            y, in the shape of x.

        Raises:
            TypeError, ValueError: x is not floating-point, or the size of its last axis is not layer_size.
        """
        x = tf.convert_to_tensor(x)
        if x.shape.rank is None or x.shape[-1] is None:
            known = [None] * (2 + input_is_3d) if x.shape.rank is None else x.shape
            x = tf.ensure_shape(x, [*known[:-1], self.layer_size])
        gain = tf.cast(tf.convert_to_tensor(getattr(self, self._gain)), x.dtype)
        return rms_norm(x, gain, variant="nematus", eps=self.eps)


class LayerNormLayer(RMSNormLayer):
    """RMSNorm in place of Nematus's LayerNormLayer: it subtracts no mean, and has no ``new_mean``.

        y = x / sqrt(mean(x_i^2) + eps) * new_std

    Args, Raises: as RMSNormLayer.

    Attributes:
        new_std: gain, (layer_size,), float32, initially 1.

    Source: Zhang & Sennrich 2019, README of github.com/bzhangGo/rmsnorm.

    Example:
        >>> import tensorflow as tf
        >>> with tf.name_scope("gates_x_norm"):
        ...     layer = LayerNormLayer(4)
        >>> layer.new_std.name
        'gates_x_norm/new_std:0'
    """

    _gain = "new_std"


def _variable(name: str, size: int) -> Any:
    if tf.executing_eagerly() or not _is_in_variable_scope():
        return tf.compat.v1.Variable(lambda: tf.ones([size]), dtype=tf.float32, name=name)
    return tf.compat.v1.get_variable(name, [size], initializer=tf.compat.v1.ones_initializer())


def _is_in_variable_scope() -> bool:
    """Whether the innermost scope is a variable scope. get_variable ignores name scopes, so names would collide."""
    scope = tf.compat.v1.get_variable_scope()
    inner = tf.compat.v1.get_default_graph().get_name_scope()
    if inner == scope.original_name_scope.rstrip("/"):
        return True
    # A variable scope that is entered again opens a name scope with a number after its name.
    last = scope.name.rpartition("/")[2]
    number = inner.rpartition("/")[2].removeprefix(last)
    return bool(last) and (not number or (number[0] == "_" and number[1:].isdecimal()))
