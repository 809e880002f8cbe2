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
    if residual is None:
        return x
    if x.dtype == residual.dtype == dtype and dtype not in dtypes.HALF:
        return x + residual
    return cast(tf.cast(x, tf.float64) + tf.cast(residual, tf.float64), dtype)


def cast(x: tf.Tensor, dtype: str) -> tf.Tensor:
    """float32 or float64 to another format in one rounding; the identity to every derivative.

    TensorFlow casts float64 to 16 bits through float32 and so rounds twice. Put on the format's own grid first, which
    ends at its subnormal numbers, x is cast exactly, also where a compiler drops a pair of casts.
    """
    if dtype in dtypes.HALF and x.dtype == tf.float64:
        step = tf.maximum(power_of_two(x) * dtypes.epsilon(dtype), dtypes.smallest_subnormal(dtype))
        x = plus(x, tf.round(x / step) * step - x)
    return tf.cast(x, dtype)


def straight_through(value: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """The value, with the derivative of x, which is as large; in graphs, for eagerly no derivative is taken of it."""
    if tf.executing_eagerly():
        return value
    return tf.where(tf.math.is_finite(tf.stop_gradient(value)), plus(x, value - x), value)


def product_error(a: tf.Tensor, b: tf.Tensor, product: tf.Tensor) -> tf.Tensor:
    """a * b - product, to 2^-75 of it, for a product within a few ulps: Dekker 1971, the halves cut by a bit mask."""
    a1, b1 = _cut(a, -(2**27)), _cut(b, -(2**27))
    a2, b2 = a - a1, b - b1
    return ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


def sum_of_squares(a: tf.Tensor, axes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Sum of a^2 over the axes, and what that rounded off, to 2^-75 of it, in any order and for any sizes.

    The squares of the upper halves, which are exact, are cut at a grid so coarse that their sum is exact, too: Rump,
    Ogita & Oishi 2008. The upper halves are constants to every derivative; what is left has the right one.
    """
    a1 = _cut(a, -(2**27))
    square = a1 * a1
    n = tf.cast(tf.reduce_prod(tf.gather(tf.shape(a), axes)), tf.float64)
    grid = power_of_two(tf.reduce_max(square, axes, keepdims=True)) * power_of_two(n) * 4  # beyond the sum
    grid = tf.minimum(grid, 2.0**1000)  # an infinite square stays infinite
    upper = (grid + square) - grid
    lower = (square - upper) + (a - a1) * (a + a1)
    upper, lower = (tf.reduce_sum(part, axes, keepdims=True) for part in (upper, lower))
    total = tf.where(tf.math.is_finite(upper), upper + lower, upper)
    return total, finite(lower - (total - upper))


def settled(product: tf.Tensor) -> tf.Tensor:
    """The product as it is, which a compiler is not to contract with a sum that follows."""
    return tf.where(tf.math.is_finite(tf.stop_gradient(product)), product, product + product)


def sum_error(a: tf.Tensor, b: Any, total: tf.Tensor) -> tf.Tensor:
    """a + b - total, exactly: Knuth."""
    t = total - a
    return finite((a - (total - t)) + (b - t))


def finite(error: tf.Tensor) -> tf.Tensor:
    """The part that was rounded off: 0 where the value is not finite, and a constant to every derivative."""
    error = tf.stop_gradient(error)
    return tf.where(tf.math.is_finite(error), error, 0.0)


def plus(a: tf.Tensor, lost: tf.Tensor) -> tf.Tensor:
    """The sum with what was rounded off. Nothing is not added: it would make +0 of -0."""
    lost = tf.stop_gradient(lost)
    return tf.where(tf.math.is_finite(lost) & tf.not_equal(lost, 0), a + lost, a)


def power_of_two(x: tf.Tensor) -> tf.Tensor:
    """2^e with 2^e <= |x| < 2^(e+1), 0 for 0 and infinity for what is not finite; a constant to every derivative."""
    return _cut(x, 0x7FF0000000000000)


def exponent_of(a: tf.Tensor) -> tf.Tensor:
    """e with 2^e the largest power of two up to a >= 0, among normal numbers; 0 where a is not finite."""
    exponent = tf.bitwise.right_shift(tf.bitcast(tf.stop_gradient(a), tf.int64), tf.constant(52, tf.int64)) - 1023
    return tf.where(exponent > 1023, tf.zeros_like(exponent), tf.clip_by_value(exponent, -1022, 1022))


def excess(exponent: tf.Tensor, limit: int) -> tf.Tensor:
    """How far beyond a limit it is. Most often 0: small numbers beside large ones are not lost."""
    return exponent - tf.clip_by_value(exponent, -limit, limit)


def two_to(exponent: tf.Tensor) -> tf.Tensor:
    biased = tf.clip_by_value(exponent, -1022, 1023) + 1023
    return tf.bitcast(tf.bitwise.left_shift(biased, tf.constant(52, tf.int64)), tf.float64)


def _cut(x: tf.Tensor, bits: int) -> tf.Tensor:
    mask = tf.constant(bits, tf.int64)
    return tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(tf.stop_gradient(x), tf.int64), mask), tf.float64)
