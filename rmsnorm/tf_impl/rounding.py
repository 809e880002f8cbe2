"""What float64 arithmetic rounds off, and single roundings to 16 bits, on TensorFlow tensors.

Graph and XLA compilers may contract a product and a sum into one operation, and merge constants of neighbouring ones.
So an error is computed against the operand that is there, not against a product formed anew, and no constant is added
only to be taken off again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from rmsnorm import dtypes


def add(x: tf.Tensor, residual: tf.Tensor | None, dtype: str) -> tf.Tensor:
    return x if residual is None else cast(tf.cast(x, tf.float64) + tf.cast(residual, tf.float64), dtype)


def cast(x: tf.Tensor, dtype: str) -> tf.Tensor:
    """float64 to another format in one rounding; the identity to every derivative.

    TensorFlow casts to 16 bits through float32 and so rounds twice. Rounded on the format's own grid first, which
    ends at its subnormal numbers, the cast is exact, and stays so where a compiler drops a pair of casts.
    """
    if dtype not in dtypes.HALF:
        return tf.cast(x, dtype)

    @tf.custom_gradient
    def rounded(x: tf.Tensor) -> Any:
        x = tf.stop_gradient(x)
        step = tf.maximum(power_of_two(x) * dtypes.epsilon(dtype), dtypes.smallest_subnormal(dtype))
        nearest = tf.where(tf.math.is_finite(x), tf.round(x / step) * step, x)
        return tf.cast(nearest, dtype), lambda dy: tf.cast(dy, tf.float64)

    return rounded(x)


def power_of_two(x: tf.Tensor) -> tf.Tensor:
    """2^e with 2^e <= |x| < 2^(e+1); 0 where x is 0 and infinity where it is not finite."""
    return _cut(x, 0x7FF0000000000000)


def product_error(a: tf.Tensor, b: tf.Tensor, product: tf.Tensor) -> tf.Tensor:
    """a * b - product, to 2^-79 of it, for a product within a few ulps: Dekker 1971, the halves cut by a bit mask."""
    a1, b1 = _cut(a, -(2**27)), _cut(b, -(2**27))
    a2, b2 = a - a1, b - b1
    return ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


def sum_of_squares(a: tf.Tensor, axes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Sum of a^2 over the axes, and what that rounded off, whatever the sizes and the order of summation.

    The squares of the upper halves, which are exact, are cut at a grid so coarse that their sum is exact, too: Rump,
    Ogita & Oishi 2008. In a derivative it is the plain sum.
    """

    @tf.custom_gradient
    def compensated(a: tf.Tensor) -> Any:
        c = tf.stop_gradient(a)
        c1 = _cut(c, -(2**27))
        square = c1 * c1
        n = tf.cast(tf.reduce_prod(tf.gather(tf.shape(c), axes)), tf.float64)
        grid = power_of_two(tf.reduce_max(square, axes, keepdims=True)) * power_of_two(n) * 4  # beyond the sum
        upper = (grid + square) - grid
        lower = (square - upper) + (c - c1) * (c + c1)
        upper, lower = (tf.reduce_sum(part, axes, keepdims=True) for part in (upper, lower))
        total = upper + lower
        return (total, lower - (total - upper)), lambda upstream, _: 2 * a * upstream

    total, error = compensated(a)
    return total, error


def settled(product: tf.Tensor) -> tf.Tensor:
    """The product as it is, which a compiler is not to contract with a sum that follows."""
    return tf.where(tf.math.is_finite(product), product, product + product)


def sum_error(a: tf.Tensor, b: Any, total: tf.Tensor) -> tf.Tensor:
    """a + b - total, exactly: Knuth."""
    t = total - a
    return finite((a - (total - t)) + (b - t))


def finite(error: tf.Tensor) -> tf.Tensor:
    return tf.where(tf.math.is_finite(error), error, 0.0)


def _cut(x: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(x, tf.int64), tf.constant(bits, tf.int64)), tf.float64)
