"""Batches of sentences as arrays of JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from rmsnorm.nematus import sentences


def source(op: str, x: Any, x_mask: Any, sizes: Sequence[int], like: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ids (factors, length, batch), checked against the sizes of the vocabularies, and their mask (length, batch)."""
    sentences.source(op, _on_host(x, 0), _on_host(x_mask, 1), sizes)
    return jnp.asarray(x), jnp.asarray(x_mask).astype(like.dtype)


def target(op: str, y: Any, batch: int, size: int, like: jax.Array, y_mask: Any = None) -> tuple[jax.Array, jax.Array]:
    """Ids (length, batch), checked against the size of the vocabulary, and their mask."""
    sentences.target(op, _on_host(y, 0), batch, size, None if y_mask is None else _on_host(y_mask, 1))
    words = jnp.asarray(y)
    mask = jnp.ones(words.shape, like.dtype) if y_mask is None else jnp.asarray(y_mask).astype(like.dtype)
    return words, mask


def _on_host(value: Any, valid: int) -> Any:
    """The value; for a tracer, which has no values, an array of its shape and dtype filled with ``valid``."""
    if isinstance(value, jax.core.Tracer):
        return np.broadcast_to(np.asarray(valid, value.dtype), value.shape)
    return value
