"""Sums of squares in the shapes that XLA's CPU backend compiles best.

What is the one operand of a sum, and is sliced or of float16, it stores in float32 or float64 first. Other sums it
hands to a library (YNN) together with what is made of them, which reads a row once but is slow in float64.
"""

from __future__ import annotations

from math import gcd

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from rmsnorm.flax_impl.rounding import convert


def squares(x: jax.Array, axis: int, start: int, stop: int, dtype: str) -> jax.Array:
    """Of the elements from start to stop of an axis, which is kept with size 1; squared and summed in ``dtype``.

    In as many strips side by side as a vector register of 64 bytes has sums.
    """

    def square(start: int, width: int) -> jax.Array:
        return jnp.square(convert(lax.slice_in_dim(x, start, start + width, axis=axis), dtype))

    zeros = (np.zeros((), dtype),) * (64 // np.dtype(dtype).itemsize)
    width = (stop - start) // len(zeros)
    terms = tuple(square(start + i * width, width) for i in range(len(zeros)))
    sums = lax.reduce(terms, zeros, lambda x, y: tuple(map(jnp.add, x, y)), (axis,))
    rest = [square(i, 1) for i in range(start + len(zeros) * width, stop)]
    return sum(convert(each, "float64") for each in [jnp.expand_dims(each, axis) for each in sums] + rest)


def squares_by_parts(x: jax.Array, axis: int, k: int) -> jax.Array | None:
    """Of the first k elements, in float32, None where they have no such parts; fastest for bfloat16.

    Not sliced but divided: up to eight parts of a row, all summed by YNN, of which those that count are taken.
    """
    n = x.shape[axis]
    parts = min(n // gcd(n, k), 8)
    width, odd = divmod(n, parts)
    if odd or k < width:
        return None
    whole = lax.optimization_barrier(x.reshape(*x.shape[:axis], parts, width, *x.shape[axis + 1 :]))
    sums = lax.optimization_barrier(jnp.sum(jnp.square(convert(whole, "float32")), axis + 1))
    first = sum(convert(lax.slice_in_dim(sums, i, i + 1, axis=axis), "float64") for i in range(k // width))
    return first if k % width == 0 else first + squares(x, axis, k - k % width, k, "float64")
