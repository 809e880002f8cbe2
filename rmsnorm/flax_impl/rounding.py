"""What float64 arithmetic rounds off, and single roundings to 16 bits, on JAX arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def add(x: jax.Array, residual: jax.Array | None, dtype: str) -> jax.Array:
    return x if residual is None else cast(double(x) + double(residual), dtype)


def double(x: jax.Array) -> jax.Array:
    return cast(x, "float64")


def cast(x: jax.Array, dtype: str) -> jax.Array:
    """x in that dtype, in one rounding; the identity to every derivative, whose transpose rounds once too."""
    return x if x.dtype.name == dtype else convert_p.bind(x, dtype=jnp.dtype(dtype))


# A primitive and not lax.convert_element_type: with x64 off that one makes no float64, also where a transformation
# meets it later, outside of enable_x64; and its transpose, which rounds the gradient, would round to 16 bits twice.
convert_p = Primitive("rms_norm_convert")


def _convert(x: jax.Array, *, dtype: np.dtype[Any]) -> jax.Array:
    """Rounded before it is converted: XLA converts float64 to 16 bits through float32, which would round twice.

    And it drops a conversion there and back, which then no longer matters: xla_allow_excess_precision.
    """
    with jax.enable_x64(True):
        if x.dtype == jnp.float64 and dtype != jnp.float64:
            into = jnp.finfo(dtype)
            spacing = float(into.smallest_subnormal)
            subnormal = lax.round(x / spacing, lax.RoundingMethod.TO_NEAREST_EVEN) * spacing
            x = jnp.where(abs(x) < float(into.smallest_normal), subnormal, lax.reduce_precision(x, 11, into.nmant))
        return lax.convert_element_type(x, dtype)


convert_p.def_impl(jax.jit(_convert, static_argnames="dtype"))
convert_p.def_abstract_eval(lambda x, *, dtype: x.update(dtype=dtype, weak_type=False))
mlir.register_lowering(convert_p, mlir.lower_fun(_convert, multiple_results=False))
ad.deflinear2(convert_p, lambda ct, x, *, dtype: [convert_p.bind(ct, dtype=x.aval.dtype)])
batching.defvectorized(convert_p)


def cut(x: jax.Array) -> jax.Array:
    """x less its last bit.

    XLA may compute one product in several places, and there contract it with a sum to one fused operation. The value
    of a cut product is the same everywhere, and nothing is lost where what was cut off is carried along.
    """
    return _keep(x, -2)


def product_error(a: jax.Array, b: jax.Array, product: jax.Array) -> jax.Array:
    """a * b - product, exactly: Dekker 1971, the halves cut by a bit mask, their products exact (and so contractible)."""
    a1, b1 = _keep(a, -(2**27)), _keep(b, -(2**27))
    a2, b2 = a - a1, b - b1
    return ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


def sum_of_squares(a: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Sum of a^2 over the axes, in pairs, and what that rounded off."""
    total = cut(a * a)
    error = product_error(a, a, total)
    for axis in axes:
        while (size := total.shape[axis]) > 1:
            parts = [size // 2, size // 2, size % 2]
            first, second, odd = lax.split(total, parts, axis)
            pairs = first + second
            e1, e2, e3 = lax.split(error, parts, axis)
            error = lax.concatenate([e1 + e2 + sum_error(first, second, pairs), e3], axis)
            total = lax.concatenate([pairs, odd], axis)
    return total, error


def sum_error(a: Any, b: Any, total: jax.Array) -> jax.Array:
    """a + b - total, exactly: Knuth."""
    t = total - a
    return finite((a - (total - t)) + (b - t))


def finite(error: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(error), error, 0.0)


def _keep(x: jax.Array, bits: int) -> jax.Array:
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int64) & bits, jnp.float64)
