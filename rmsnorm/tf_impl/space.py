"""What recipe.py asks of an array library, on tensors of TensorFlow, whose sizes a graph may not know yet."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any, Final

import tensorflow as tf

from rmsnorm import recipe
from rmsnorm.specification.call import Call
from rmsnorm.specification.variants import Variant


def _where(chosen: tf.Tensor, a: Any, b: Any) -> tf.Tensor:
    """Of a tensor and a number, or of two tensors."""
    like = a if tf.is_tensor(a) else b
    return tf.where(chosen, *(tf.convert_to_tensor(value, like.dtype) for value in (a, b)))


def _rounded(a: tf.Tensor, name: str) -> tf.Tensor:
    return tf.cast(tf.cast(a, name), a.dtype)


def straight_through(value: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
    """A value that is near to a, with the derivative of a."""
    return a + tf.stop_gradient(tf.where(tf.math.is_finite(value), value - a, value))


def _over(a: tf.Tensor, axes: tuple[int, ...]) -> tf.Tensor:
    return tf.reduce_sum(a, axes) if axes else a


def _shape(a: tf.Tensor) -> list[Any]:
    """Sizes, each a number or, if the graph does not know it yet, a tensor."""
    known = a.shape.as_list()
    if None not in known:
        return known
    sizes = tf.shape(a, tf.int64)
    return [sizes[axis] if size is None else size for axis, size in enumerate(known)]


def _counted(variant: Variant, n: tf.Tensor) -> tf.Tensor:
    """Variant.counted of a size that the graph does not know yet."""
    p = Fraction(variant.partial or 1)
    up = p.denominator - 1 if variant.partial_rounding == "ceil" else 0
    return tf.minimum(n, tf.maximum((n * p.numerator + up) // p.denominator, 1))


def _root_for_integers(_: Any, q: tf.Tensor) -> tf.Tensor:
    return q * tf.math.rsqrt(tf.maximum(q, 1e-37))


def _mean_square_for_integers(
    ops: Any, call: Call, c: tf.Tensor, row: recipe.Row, least: float
) -> tuple[tf.Tensor, tf.Tensor | float]:
    """Without a unit, beside which LiteRT takes all numbers as 0: a square beyond float32 is infinite, as in Keras."""
    if c.dtype == tf.float32 == call.x_dtype and row.counted is None and least > 1e-12:
        return ops.mean(c * c, call.axes), 1.0
    return recipe.mean_square(ops, call, c, row, least)


def _reciprocal_for_integers(a: tf.Tensor) -> tf.Tensor:
    root = tf.math.rsqrt(a)
    return root * root


OPS: Final = SimpleNamespace(
    name_of=lambda a: a.dtype.name, cast=tf.cast, rounded=_rounded, constant=tf.stop_gradient,
    shape=_shape, counted=_counted, reshape=tf.reshape, broadcast_to=tf.broadcast_to, ones_like=tf.ones_like,
    index=lambda a, entries: a[entries],
    arange=lambda n, like: tf.range(n, dtype=tf.int64),
    where=_where, maximum=tf.maximum, sqrt=tf.sqrt, rsqrt=tf.math.rsqrt, reciprocal=tf.math.reciprocal,
    sigmoid=tf.sigmoid, silu=lambda z: z * tf.sigmoid(z),
    sum=lambda a, axes: tf.reduce_sum(a, axes, keepdims=True),
    mean=lambda a, axes: tf.reduce_mean(a, axes, keepdims=True),
    max=lambda a, axes: tf.reduce_max(a, axes, keepdims=True),
    over=_over, mean_square=recipe.mean_square, root=recipe.root, is_spread=False,
)  # fmt: skip
# For TensorFlow to derive, in forward mode: it has no other derivative of a rounding than that of a cast.
DERIVED: Final = SimpleNamespace(**{**vars(OPS), "rounded": lambda a, name: straight_through(_rounded(a, name), a)})
# For graphs that LiteRT may compute in integers: in these it has no division, no comparison and no square root.
FOR_INTEGERS: Final = SimpleNamespace(**{
    **vars(OPS), "mean_square": _mean_square_for_integers, "root": _root_for_integers,
    "reciprocal": _reciprocal_for_integers,
})  # fmt: skip
