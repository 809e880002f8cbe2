"""The operations of recipe.py in JAX, where every derivative of every order may be taken through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from rmsnorm import recipe

Axes: TypeAlias = tuple[int, ...]


@jax.custom_jvp
def with_derivatives_of(_: jax.Array, value: jax.Array) -> jax.Array:
    """The value, whose derivatives are those of the first array."""
    return value


@with_derivatives_of.defjvp
def _differentiate_first(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return with_derivatives_of(*primals), tangents[0]


def rounded(a: jax.Array, name: str) -> jax.Array:
    """By ``reduce_precision``: XLA drops a conversion to a narrower dtype and back."""
    if a.dtype.name == name:
        return a
    info = jnp.finfo(name)
    result = lax.reduce_precision(a, info.nexp, info.nmant)
    if info.nexp != jnp.finfo(a.dtype).nexp:
        least = np.array(info.smallest_subnormal, a.dtype)
        subnormal = lax.round(a / least, lax.RoundingMethod.TO_NEAREST_EVEN) * least
        result = jnp.where(abs(a) < np.array(info.smallest_normal, a.dtype), subnormal, result)
    return with_derivatives_of(a, result)


# In the derivatives that JAX has for these two there are powers of a, which leave the range of float32 before the rest
# of a product brings them back. Here a tangent is multiplied by 1 / a or 1 / sqrt(a) at a time.
@jax.custom_jvp
def rsqrt(a: jax.Array) -> jax.Array:
    return lax.rsqrt(a)


@rsqrt.defjvp
def _differentiate_rsqrt(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    root = rsqrt(*primals)
    return root, tangents[0] * -0.5 * root * root * root


@jax.custom_jvp
def reciprocal(a: jax.Array) -> jax.Array:
    return 1 / a


@reciprocal.defjvp
def _differentiate_reciprocal(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    inverse = reciprocal(*primals)
    return inverse, -tangents[0] * inverse * inverse


@dataclass(frozen=True)
class Space:
    """``ops`` of recipe.py. With the name of an axis rows are spread over the devices along it, or groups of them."""

    axis_name: Any = None
    groups: tuple[tuple[int, ...], ...] | None = None

    where, reshape, broadcast_to = staticmethod(jnp.where), staticmethod(jnp.reshape), staticmethod(jnp.broadcast_to)
    maximum, ones_like, sqrt = staticmethod(jnp.maximum), staticmethod(jnp.ones_like), staticmethod(jnp.sqrt)
    sigmoid, silu, constant = staticmethod(jax.nn.sigmoid), staticmethod(jax.nn.silu), staticmethod(lax.stop_gradient)
    rounded, rsqrt, reciprocal = staticmethod(rounded), staticmethod(rsqrt), staticmethod(reciprocal)
    mean_square, root, shape = staticmethod(recipe.mean_square), staticmethod(recipe.root), staticmethod(jnp.shape)

    @property
    def is_spread(self) -> bool:
        return self.axis_name is not None

    @staticmethod
    def name_of(a: jax.Array) -> str:
        return a.dtype.name

    @staticmethod
    def cast(a: jax.Array, name: str) -> jax.Array:
        return a.astype(name)

    @staticmethod
    def index(a: jax.Array, entries: tuple[Any, ...]) -> jax.Array:
        return a[entries]

    @staticmethod
    def arange(n: int, _: jax.Array) -> jax.Array:
        return jnp.arange(n)

    @staticmethod
    def over(a: jax.Array, axes: Axes) -> jax.Array:
        return jnp.sum(a, axes)

    def sum(self, a: jax.Array, axes: Axes) -> jax.Array:
        return self._across(lax.psum, jnp.sum(a, axes, keepdims=True))

    def mean(self, a: jax.Array, axes: Axes) -> jax.Array:
        return self._across(lax.pmean, jnp.mean(a, axes, keepdims=True))

    def max(self, a: jax.Array, axes: Axes) -> jax.Array:
        return self._across(lax.pmax, jnp.max(a, axes, keepdims=True, initial=0))

    def _across(self, collect: Callable[..., jax.Array], part: jax.Array) -> jax.Array:
        if self.axis_name is None:
            return part
        return collect(part, self.axis_name, axis_index_groups=self.groups)
