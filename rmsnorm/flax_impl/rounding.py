"""Single roundings to 16 bits, powers of two, and other helpers on JAX arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial as bind
from functools import reduce, wraps
from typing import Any, Final, TypeVar

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from rmsnorm.flax_impl.private import Primitive, ad, batching, enable_x64, mlir

F = TypeVar("F", bound=Callable[..., Any])
_INTEGER: Final = {2: jnp.int16, 4: jnp.int32}
_TO_EVEN: Final = lax.RoundingMethod.TO_NEAREST_EVEN


def with_x64(function: F) -> F:
    """A decorator: JAX has float64 inside of the function, also where a transformation traces it after the call."""

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        with enable_x64(True):
            return function(*args, **options)

    return run  # type: ignore[return-value]


def add(x: jax.Array, residual: jax.Array | None, dtype: str) -> jax.Array:
    return x if residual is None else _add(x, residual, dtype)


@bind(jax.jit, static_argnums=2)  # one pass over memory, also in an eager call
def _add(x: jax.Array, residual: jax.Array, dtype: str) -> jax.Array:
    return cast(double(x) + double(residual), dtype)


def double(x: jax.Array) -> jax.Array:
    return cast(x, "float64")


def cast(x: jax.Array, dtype: str) -> jax.Array:
    """x in that dtype, in one rounding; the identity to every derivative, whose transpose rounds once too."""
    return x if x.dtype.name == dtype else convert_p.bind(x, dtype=jnp.dtype(dtype), bits=True)


def convert(x: jax.Array, dtype: str) -> jax.Array:
    """As cast, but by XLA's conversion where that rounds once. XLA fuses it; on CPUs it takes subnormal x for 0."""
    return x if x.dtype.name == dtype else converted_sum([x], dtype)


def converted_sum(terms: Sequence[jax.Array], dtype: str) -> jax.Array:
    """Sum of arrays of one shape and dtype, converted once."""
    return convert_p.bind(*terms, dtype=jnp.dtype(dtype), bits=False)


def rounded(x: jax.Array, dtype: str) -> jax.Array:
    """The numbers that x becomes in that dtype, in the wider dtype of x: XLA drops conversions there and back."""
    if x.dtype.name == dtype:
        return x
    info = jnp.finfo(dtype)
    if info.nexp == jnp.finfo(x.dtype).nexp:
        return lax.reduce_precision(x, info.nexp, info.nmant)
    least = np.array(info.smallest_subnormal, x.dtype)
    tiny = lax.round(x / least, _TO_EVEN) * least
    normal = lax.reduce_precision(x, info.nexp, info.nmant)
    return jnp.where(abs(x) < np.array(info.smallest_normal, x.dtype), tiny, normal)


# A primitive and not lax.convert_element_type: with x64 off that one makes no float64, also where a transformation
# meets it outside of enable_x64; and its transpose, which rounds the gradient, would round to 16 bits twice.
convert_p = Primitive("rms_norm_convert")


@with_x64
def _convert(*terms: jax.Array, dtype: np.dtype[Any], bits: bool) -> jax.Array:
    x = reduce(lax.add, terms)
    if x.dtype == jnp.float64 and (bits or dtype.itemsize == 2):
        return _narrow(x, dtype)
    return _widen(x) if bits else x.astype(dtype)


def _transpose(ct: Any, *terms: Any, dtype: np.dtype[Any], bits: bool) -> list[Any]:
    """The gradient of each term, each behind one barrier more, without which XLA would store one for all of them."""
    out = []
    for term in terms:
        out.append(convert_p.bind(ct, dtype=term.aval.dtype, bits=bits))
        ct = lax.optimization_barrier(ct)
    return out


def _batch(terms: Sequence[Any], dims: Sequence[Any], **options: Any) -> tuple[Any, int]:
    size = next(term.shape[dim] for term, dim in zip(terms, dims, strict=True) if dim is not None)
    front = [batching.bdim_at_front(term, dim, size) for term, dim in zip(terms, dims, strict=True)]
    return convert_p.bind(*front, **options), 0


def _widen(x: jax.Array) -> jax.Array:
    """To float64, subnormal numbers by their bits: XLA takes them for 0 on CPUs."""
    info, integer = jnp.finfo(x.dtype), _INTEGER[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, integer)
    magnitude = bits & np.iinfo(integer).max
    tiny = magnitude.astype(jnp.float64) * float(info.smallest_subnormal)
    return jnp.where(magnitude < 2**info.nmant, jnp.where(bits < 0, -tiny, tiny), x.astype(jnp.float64))


def _narrow(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """From float64, rounded before it is converted.

    XLA would convert to 16 bits through float32, and so round twice. It also drops a conversion to a narrower dtype and
    back (xla_allow_excess_precision in https://github.com/openxla/xla/blob/main/xla/xla.proto). Once x is rounded, that
    changes no number.
    """
    info, integer = jnp.finfo(dtype), _INTEGER[dtype.itemsize]
    is_tiny = abs(x) < float(info.smallest_normal)
    normal = lax.reduce_precision(x, 11, info.nmant).astype(dtype)
    units = lax.round(zero_outside(is_tiny, abs(x)) / float(info.smallest_subnormal), _TO_EVEN).astype(integer)
    negative = lax.bitcast_convert_type(x, jnp.int64) < 0
    tiny = lax.bitcast_convert_type(jnp.where(negative, units | np.iinfo(integer).min, units), dtype)
    return jnp.where(is_tiny, tiny, normal)


convert_p.def_impl(jax.jit(_convert, static_argnames=("dtype", "bits")))
convert_p.def_abstract_eval(lambda x, *_, dtype, bits: x.update(dtype=dtype, weak_type=False))
mlir.register_lowering(convert_p, mlir.lower_fun(_convert, multiple_results=False))
ad.deflinear2(convert_p, _transpose)
batching.primitive_batchers[convert_p] = _batch


def through_bits(x: jax.Array) -> jax.Array:
    """x >= 0, to bits and back. XLA's CPU backend fuses nothing across that, and so does not store h / rho."""
    return _with_bits(x, 2**63 - 1)


def number_as(k: Any, dtype: str) -> Any:
    return np.dtype(dtype).type(k) if isinstance(k, np.generic) else convert(k, dtype)


def zero_outside(mask: jax.Array | None, h: jax.Array) -> jax.Array:
    """h, with 0 where a mask is False."""
    return h if mask is None else where(mask, h, 0)


def where(condition: jax.Array, x: jax.Array, number: float) -> jax.Array:
    """As jnp.where. JAX 0.7 would give its number 32 bits if it lowers the call after x64 is switched off again."""
    return jnp.where(condition, x, jnp.full((), number, x.dtype))


def zeros_of(x: jax.Array, dtype: Any) -> jax.Array:
    """Zeros in the shape of x and on its devices, which jnp.zeros_like does not keep from JAX 0.12 on."""
    return (x < x).astype(dtype)


def rounded_within(x: jax.Array, dtype: str, wide: str) -> jax.Array:
    return convert(x if dtype == wide else rounded(x, dtype), wide)


def clip(x: jax.Array, least: float, largest: float) -> jax.Array:
    """As jnp.clip. JAX 0.7 would give its bounds 32 bits, as in ``where``."""
    return jnp.minimum(jnp.maximum(x, least), largest)


def power_of_two(x: jax.Array) -> jax.Array:
    """The largest power of two that is not above x > 0; infinity for NaN."""
    return _with_bits(x, 0x7FF0000000000000)


def exponent_of(a: jax.Array) -> jax.Array:
    """e with 2^e the largest power of two up to a >= 0, among normal numbers; 0 where a is not finite."""
    exponent = (lax.bitcast_convert_type(a, jnp.int64) >> 52) - 1023
    return zero_outside(exponent <= 1023, clip(exponent, -1022, 1022))


def excess(exponent: jax.Array, limit: int) -> jax.Array:
    """How far beyond a limit it is: 20 for 120 and 100, but 0 for 50, so that most numbers are not scaled at all."""
    return exponent - clip(exponent, -limit, limit)


def times_two_to(power: jax.Array, x: jax.Array) -> jax.Array:
    """x 2^power, for a power up to twice the largest of a number."""
    halves = power >> 1, power - (power >> 1)
    return x * _two_to(halves[0]) * _two_to(halves[1])


def _two_to(exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((clip(exponent, -1022, 1023) + 1023) << 52, jnp.float64)


def _with_bits(x: jax.Array, bits: int) -> jax.Array:
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int64) & bits, jnp.float64)
