"""Numbers as unevaluated sums of two, a + a_error, in Pallas: of float32 they have 48 bits, of float64 106.

The errors are exact only if no product of two numbers leaves the range, which the kernels check (``is_outside``), and
if no compiler contracts a product with a sum. So products are instructions of their own on a GPU, written in assembly;
where the kernels are interpreted, XLA compiles for a CPU, and there products go through integers, and subnormal
numbers, which it takes for 0, too. Source: Dekker 1971; Boldo & Melquiond 2008 for rounding to odd.
"""

from __future__ import annotations

from typing import Any, Final

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.experimental.pallas import triton

from rmsnorm.call import Call

# Where pairs of float32 are as exact as they should be: products, and rho.
LEAST: Final = 2.0**-90
MOST: Final = 2.0**90
LEAST_RHO: Final = 2.0**-30
MOST_RHO: Final = 2.0**30

_LETTER: Final = {"float32": ("f32", "f"), "float64": ("f64", "d")}  # of a type and of a register, in assembly


class Machine:
    """The operations that differ between a GPU and the interpreter, which has them compiled for a CPU."""

    def __init__(self, is_interpreted: bool) -> None:
        self.is_interpreted = is_interpreted

    def times(self, a: Any, b: Any) -> jax.Array:
        """a * b, which no compiler contracts with a sum; of float64 in the interpreter less its last bit."""
        if not self.is_interpreted:
            return _in_assembly("mul.rn", a, b)
        if a.dtype == jnp.float64:
            return _keep(a * b, -2)
        return lax.reduce_precision(self.wide(a) * self.wide(b), 8, 23).astype(jnp.float32)

    def excess(self, a: Any, b: Any, c: Any) -> jax.Array:
        """a * b - c, exactly, of a c near a * b."""
        if not self.is_interpreted:
            return _in_assembly("fma.rn", a, b, -c)
        if a.dtype == jnp.float64:  # Dekker 1971, the halves cut by a bit mask
            a, b = jnp.broadcast_arrays(a, b)
            a1, b1 = _keep(a, -(2**27)), _keep(b, -(2**27))
            a2, b2 = a - a1, b - b1
            return ((a1 * b1 - c) + a1 * b2 + a2 * b1) + a2 * b2
        return (self.wide(a) * self.wide(b) - self.wide(c)).astype(jnp.float32)

    def sqrt(self, a: jax.Array) -> jax.Array:
        return jnp.sqrt(a) if self.is_interpreted else _in_assembly("sqrt.rn", a)

    def wide(self, a: jax.Array) -> jax.Array:
        """In float64."""
        if not self.is_interpreted or a.dtype == jnp.float64:
            return a.astype(jnp.float64)
        info, integer = jnp.finfo(a.dtype), {2: jnp.int16, 4: jnp.int32}[a.dtype.itemsize]
        bits = lax.bitcast_convert_type(a, integer)
        magnitude = bits & np.iinfo(integer).max
        tiny = magnitude.astype(jnp.float64) * float(info.smallest_subnormal)
        return jnp.where(magnitude < 2**info.nmant, jnp.where(bits < 0, -tiny, tiny), a.astype(jnp.float64))

    def single(self, a: jax.Array) -> jax.Array:
        """A float64 rounded to float32."""
        if not self.is_interpreted:
            return a.astype(jnp.float32)
        is_tiny, least = abs(a) < 2.0**-126, 2.0**-149
        steps = lax.round(jnp.where(is_tiny, abs(a), 0.0) / least, lax.RoundingMethod.TO_NEAREST_EVEN)
        bits = steps.astype(jnp.int32) | jnp.where(lax.bitcast_convert_type(a, jnp.int64) < 0, np.int32(-(2**31)), 0)
        return jnp.where(is_tiny, lax.bitcast_convert_type(bits, jnp.float32), a.astype(jnp.float32))

    def to_format(self, a: jax.Array, name: str) -> jax.Array:
        """A float32 rounded once to a format."""
        if not self.is_interpreted or name != "bfloat16":
            return a.astype(name)
        bits = lax.bitcast_convert_type(a, jnp.uint32)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(jnp.uint16)
        nearest = jnp.where(a != a, np.uint16(0x7FC0), nearest)
        return lax.bitcast_convert_type(nearest, jnp.bfloat16)

    def product(self, a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
        """a * b, and what that rounds off."""
        product = self.times(a, b)
        return product, self.excess(a, b, product)

    def pair_product(self, a: Any, a_error: Any, b: Any, b_error: Any) -> tuple[jax.Array, jax.Array]:
        product, error = self.product(a, b)
        return _renormalised(product, error + (a * b_error + a_error * b))

    def pair_quotient(self, a: Any, a_error: Any, b: Any, b_error: Any) -> tuple[jax.Array, jax.Array]:
        quotient = a / b
        rest = -self.excess(quotient, b, a) + (a_error - quotient * b_error)
        return quotient, rest / b

    def split(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A float64 as a pair of float32."""
        high = self.single(number)
        return high, self.single(number - self.wide(high))

    def rounded(self, a: jax.Array, a_error: jax.Array, name: str) -> jax.Array:
        """A pair of float32 rounded once to a format."""
        total, error = two_sum(a, a_error)
        total = jnp.where(a_error == 0, a, total)  # a sum would make +0 of -0
        if name == "float32":
            return total
        is_inexact = (error != 0) & (abs(total) < np.inf)
        return self.to_format(_to_odd(total, is_inexact, (error < 0) != (total < 0)), name)

    def rounded_wide(self, number: jax.Array, name: str) -> jax.Array:
        """A float64 rounded once to a format."""
        single = self.single(number)
        if name == "float32":
            return single
        wide = self.wide(single)
        is_inexact = (wide != number) & (abs(wide) < np.inf)
        return self.to_format(_to_odd(single, is_inexact, abs(number) < abs(wide)), name)

    def is_outside(self, product: jax.Array, *factors: jax.Array) -> jax.Array:
        """Whether the error of a product of float32 may be inexact, or it is not finite."""
        size, is_small = abs(product), abs(product) < LEAST
        for factor in factors:
            is_small = is_small & ((self.wide(factor) if self.is_interpreted else factor) != 0)
        return ~(size <= MOST) | is_small

    def rho_of(self, call: Call, q: jax.Array) -> jax.Array:
        """rho in float64 of a mean square."""
        position = call.variant.eps_position
        if position == "inside":
            return self.sqrt(q + call.eps)
        root = self.sqrt(q)
        if position == "outside":
            return root + call.eps
        return jnp.where(root < floor_of(call), floor_of(call), root)


def floor_of(call: Call) -> float:
    """The least rho of a clamp."""
    return float(call.eps / call.k**0.5)


def two_sum(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
    """a + b, and what that rounds off."""
    total = a + b
    t = total - a
    return total, (a - (total - t)) + (b - t)


def pair_sum(a: Any, a_error: Any, b: Any, b_error: Any) -> tuple[jax.Array, jax.Array]:
    total, error = two_sum(a, b)
    return _renormalised(total, error + (a_error + b_error))


def pair_total(a: jax.Array, a_error: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of pairs along the last axis, whose size is a power of two; it stays, with size 1."""
    while (half := a.shape[-1] // 2) > 0:
        (a, b), (a_error, b_error) = (lax.split(part, (half, half), axis=part.ndim - 1) for part in (a, a_error))
        a, a_error = pair_sum(a, a_error, b, b_error)
    return a, a_error


def is_between(number: jax.Array, least: float, most: float) -> jax.Array:
    return (number >= least) & (number <= most)


def _renormalised(total: jax.Array, error: jax.Array) -> tuple[jax.Array, jax.Array]:
    result = total + error
    return result, error - (result - total)


def _to_odd(single: jax.Array, is_inexact: jax.Array, is_less: jax.Array) -> jax.Array:
    """A float32, or the odd one of the two around a number that it is not: so the next rounding is that of the number.

    ``is_less``: whether the number is nearer to 0.
    """
    bits = lax.bitcast_convert_type(single, jnp.int32)
    odd = (bits - is_less.astype(jnp.int32)) | 1
    return lax.bitcast_convert_type(jnp.where(is_inexact, odd, bits), jnp.float32)


def _keep(a: jax.Array, bits: int) -> jax.Array:
    return lax.bitcast_convert_type(lax.bitcast_convert_type(a, jnp.int64) & bits, jnp.float64)


def _in_assembly(operation: str, *operands: Any) -> jax.Array:
    arrays = jnp.broadcast_arrays(*operands)
    (name,) = {array.dtype.name for array in arrays}
    kind, register = _LETTER[name]
    sources = ", ".join(f"${i + 1}" for i in range(len(arrays)))
    (result,) = triton.elementwise_inline_asm(
        f"{operation}.{kind} $0, {sources};",
        args=arrays,
        constraints=",".join([f"={register}", *[register] * len(arrays)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)],
    )
    return result
