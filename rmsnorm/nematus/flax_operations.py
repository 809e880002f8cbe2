"""The operations of models/operations.py in JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial as bind
from operator import getitem
from typing import Any, Final

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from rmsnorm.flax_impl import functional
from rmsnorm.nematus.models.operations import Arrays, Step
from rmsnorm.specification import dtypes

attention: Final = None

tanh, sigmoid, relu = jnp.tanh, jax.nn.sigmoid, jax.nn.relu
shape, rows, where, to_host = jnp.shape, getitem, jnp.where, np.asarray
concatenated, repeated, sum = jnp.concatenate, jnp.repeat, jnp.sum
split, reshape = bind(jnp.split, axis=-1), jnp.reshape
softmax, logsumexp = jax.nn.softmax, jax.nn.logsumexp
transposed, swapped = jnp.matrix_transpose, bind(jnp.swapaxes, axis1=1, axis2=2)
# Accelerators multiply in a lower precision by default.
matmul = bind(jnp.matmul, precision=lax.Precision.HIGHEST)
rms_norm = bind(functional.rms_norm, variant="nematus")


def cast(x: Any, like: jax.Array) -> jax.Array:
    return jnp.asarray(x).astype(like.dtype)


def filled(shape: Sequence[int], value: float, like: jax.Array) -> jax.Array:
    return jnp.full(shape, value, like.dtype)


def take(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(table, jnp.maximum(ids, 0), axis=0)


def log_softmax(x: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(x.astype(dtypes.arithmetic(x.dtype.name)))


def picked(x: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, ids[..., None], axis=-1)[..., 0]


def layer_norm(x: jax.Array, gain: jax.Array, offset: jax.Array | None, eps: float) -> jax.Array:
    """LayerNorm, computed in at least float32."""
    wide = dtypes.arithmetic(x.dtype.name)
    centred = x.astype(wide)
    centred = centred - centred.mean(-1, keepdims=True)
    y = centred * lax.rsqrt((centred * centred).mean(-1, keepdims=True) + eps) * gain.astype(wide)
    return (y if offset is None else y + offset.astype(wide)).astype(x.dtype)


def dropout(x: jax.Array, rate: float, random: Iterator[Any]) -> jax.Array:
    return jnp.where(jax.random.bernoulli(next(random), 1 - rate, x.shape), x / (1 - rate), 0)


def positions(start: Any, count: int, length: int, size: int, like: jax.Array) -> jax.Array:
    frequencies = np.exp(-np.arange(size // 2) * math.log(10000) / (size // 2 - 1))
    angles = np.arange(length)[:, None] * frequencies
    table = np.concatenate((np.sin(angles), np.cos(angles), np.zeros((length, size % 2))), axis=1)
    return lax.dynamic_slice_in_dim(jnp.asarray(table, like.dtype), start, count)


def future(start: Any, count: int, length: int, score: float, like: jax.Array) -> jax.Array:
    is_future = jnp.arange(length) > start + jnp.arange(count)[:, None]
    return jnp.where(is_future, score, 0.0).astype(like.dtype)


def cached(cache: jax.Array, new: jax.Array, start: Any) -> jax.Array:  # so a step of a search is compiled once
    return lax.dynamic_update_slice_in_dim(cache, new, start, 1)


def scan(
    step: Step, state: Arrays, inputs: Arrays, others: Arrays = (), *, reverse: bool = False
) -> tuple[Arrays, Arrays]:
    def body(state: Arrays, inputs: Arrays) -> Any:
        new, more = step(state, inputs)
        return new, (new, more)

    results: tuple[Arrays, Arrays] = lax.scan(body, state, inputs, reverse=reverse)[1]
    return results


def checked(check: Callable[..., Any], ids: Any, mask: Any) -> Any:
    """Of what is traced, which has no values, the shape and the dtype are checked."""
    result = check(_on_host(ids, 0), _on_host(mask, 1))
    return (ids, mask) if any(isinstance(value, jax.core.Tracer) for value in (ids, mask)) else result


def _on_host(value: Any, valid: int) -> Any:
    is_traced = isinstance(value, jax.core.Tracer)
    return np.broadcast_to(np.asarray(valid, value.dtype), value.shape) if is_traced else value


def as_ids(ids: Any, like: jax.Array) -> jax.Array:
    return jnp.asarray(ids)
