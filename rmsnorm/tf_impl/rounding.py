"""Single roundings to 16 bits, and powers of two, on TensorFlow tensors.

Graph and XLA compilers may contract a product and a sum into one operation, and merge constants of neighbouring ones.
So no constant is added only to be taken off again.
"""

from __future__ import annotations

import tensorflow as tf

from rmsnorm.specification import dtypes


def add(x: tf.Tensor, residual: tf.Tensor | None, dtype: str) -> tf.Tensor:
    if residual is None:
        return x
    if x.dtype == residual.dtype == dtype and dtype not in dtypes.HALF:
        return x + residual
    return cast(tf.cast(x, tf.float64) + tf.cast(residual, tf.float64), dtype)


def cast(x: tf.Tensor, dtype: str) -> tf.Tensor:
    """float32 or float64 to another format in one rounding; the identity to every derivative.

    TensorFlow casts float64 to 16 bits through float32 and so rounds twice. So x is first rounded to a multiple of the
    spacing that the format has there, which is no smaller than its smallest subnormal number. The cast then changes no
    number, and a compiler may drop it.
    """
    if dtype in dtypes.HALF and x.dtype == tf.float64:
        spacing = tf.maximum(power_of_two(x) * dtypes.epsilon(dtype), dtypes.smallest_subnormal(dtype))
        x = with_constant(x, tf.round(x / spacing) * spacing - x)
    return tf.cast(x, dtype)


def straight_through(value: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """The value, which is x rounded, with the derivative of x; eagerly without one, as none is taken of it there."""
    if tf.executing_eagerly():
        return value
    return tf.where(tf.math.is_finite(tf.stop_gradient(value)), with_constant(x, value - x), value)


def zero_outside(mask: tf.Tensor | None, x: tf.Tensor) -> tf.Tensor:
    """x, with 0 where a mask is False."""
    return x if mask is None else tf.where(mask, x, 0.0)


def uncontracted(product: tf.Tensor) -> tf.Tensor:
    """The product as it is, which a compiler is not to contract with a sum that follows."""
    return tf.where(tf.math.is_finite(tf.stop_gradient(product)), product, product + product)


def with_constant(a: tf.Tensor, constant: tf.Tensor) -> tf.Tensor:
    """The sum with a constant to every derivative. A 0 is not added: it would make +0 of -0."""
    constant = tf.stop_gradient(constant)
    return tf.where(tf.math.is_finite(constant) & tf.not_equal(constant, 0), a + constant, a)


def power_of_two(x: tf.Tensor) -> tf.Tensor:
    """2^e with 2^e <= |x| < 2^(e+1), 0 for 0 and infinity for what is not finite; a constant to every derivative."""
    exponent = tf.bitwise.bitwise_and(tf.bitcast(tf.stop_gradient(x), tf.int64), tf.constant(0x7FF << 52, tf.int64))
    return tf.bitcast(exponent, tf.float64)


def exponent_of(a: tf.Tensor) -> tf.Tensor:
    """e with 2^e the largest power of two up to a >= 0, among normal numbers; 0 where a is not finite."""
    exponent = tf.bitwise.right_shift(tf.bitcast(tf.stop_gradient(a), tf.int64), tf.constant(52, tf.int64)) - 1023
    return tf.where(exponent > 1023, tf.zeros_like(exponent), tf.clip_by_value(exponent, -1022, 1022))


def excess(exponent: tf.Tensor, limit: int) -> tf.Tensor:
    """How far beyond a limit it is: 20 for 120 and 100, but 0 for 50, so that most numbers are not scaled at all."""
    return exponent - tf.clip_by_value(exponent, -limit, limit)


def two_to(exponent: tf.Tensor) -> tf.Tensor:
    biased = tf.clip_by_value(exponent, -1022, 1023) + 1023
    return tf.bitcast(tf.bitwise.left_shift(biased, tf.constant(52, tf.int64)), tf.float64)
