"""What float64 arithmetic rounds off, and single roundings to 16 bits, on JAX arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_INTEGER: Final = {2: jnp.int16, 4: jnp.int32}
_TO_EVEN: Final = lax.RoundingMethod.TO_NEAREST_EVEN


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
    with jax.enable_x64(True):  # also where a transformation traces this, when the caller's is long over
        return _narrow(x, dtype) if x.dtype == jnp.float64 else _widen(x)


def _widen(x: jax.Array) -> jax.Array:
    """To float64, subnormal numbers by their bits: XLA takes them for 0 on CPUs."""
    info, integer = jnp.finfo(x.dtype), _INTEGER[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, integer)
    magnitude = bits & np.iinfo(integer).max
    tiny = magnitude.astype(jnp.float64) * float(info.smallest_subnormal)
    return jnp.where(magnitude < 2**info.nmant, jnp.where(bits < 0, -tiny, tiny), x.astype(jnp.float64))


def _narrow(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """From float64, rounded before it is converted.

    XLA would convert to 16 bits through float32 and so round twice, and drop conversions there and back, which now
    matters no longer: xla_allow_excess_precision in
    https://github.com/openxla/xla/blob/main/xla/xla.proto.
    """
    info, integer = jnp.finfo(dtype), _INTEGER[dtype.itemsize]
    is_tiny = abs(x) < float(info.smallest_normal)
    normal = lax.reduce_precision(x, 11, info.nmant).astype(dtype)
    steps = lax.round(jnp.where(is_tiny, abs(x), 0.0) / float(info.smallest_subnormal), _TO_EVEN).astype(integer)
    negative = lax.bitcast_convert_type(x, jnp.int64) < 0
    tiny = lax.bitcast_convert_type(jnp.where(negative, steps | np.iinfo(integer).min, steps), dtype)
    return jnp.where(is_tiny, tiny, normal)


convert_p.def_impl(jax.jit(_convert, static_argnames="dtype"))
convert_p.def_abstract_eval(lambda x, *, dtype: x.update(dtype=dtype, weak_type=False))
mlir.register_lowering(convert_p, mlir.lower_fun(_convert, multiple_results=False))
ad.deflinear2(convert_p, lambda ct, x, *, dtype: [convert_p.bind(ct, dtype=x.aval.dtype)])
batching.defvectorized(convert_p)


def cut(x: jax.Array) -> jax.Array:
    """x less its last bit.

    XLA may compute one product in several places, and there contract it with a sum to one fused operation. The value
    of a cut product is the same everywhere, and nothing is lost where what was cut off is carried along. What was cut
    off of a tiny x would be subnormal, which XLA takes for 0 on CPUs.
    """
    return jnp.where(abs(x) < 2.0**-900, x, _keep(x, -2))


def product_error(a: jax.Array, b: jax.Array, product: jax.Array) -> jax.Array:
    """a * b - product, exactly: Dekker 1971, the halves cut by a bit mask. Exact products may be contracted."""
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
