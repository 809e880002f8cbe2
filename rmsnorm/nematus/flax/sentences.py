"""Batches of sentences as arrays of JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import numpy as jnp

from rmsnorm.nematus import sentences
from rmsnorm.nematus.dialects import rules

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


def source(op: str, x: Any, x_mask: Any, config: Config, like: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ids (factors, length, batch), checked against the sizes of the vocabularies, and their mask (length, batch)."""
    checked = sentences.source(op, _on_host(x, 0), _on_host(x_mask, 1), config)
    if not _is_traced(x, x_mask):
        x, x_mask = checked
    return jnp.asarray(x), jnp.asarray(x_mask).astype(like.dtype)


def target(
    op: str, y: Any, batch: int, config: Config, like: jax.Array, y_mask: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Ids (length, batch), checked against the size of the vocabulary, and their mask."""
    checked = sentences.target(op, _on_host(y, 0), batch, config, None if y_mask is None else _on_host(y_mask, 1))
    if not _is_traced(y, y_mask):
        y, y_mask = checked
    words = jnp.asarray(y)
    if y_mask is None:
        y_mask = words != 0 if rules(config).pads_with_zero else jnp.ones(words.shape)
    return words, jnp.asarray(y_mask).astype(like.dtype)


def _is_traced(*values: Any) -> bool:
    return any(isinstance(value, jax.core.Tracer) for value in values)


def _on_host(value: Any, valid: int) -> Any:
    """The value; for a tracer, which has no values, an array of its shape and dtype filled with ``valid``."""
    if isinstance(value, jax.core.Tracer):
        return np.broadcast_to(np.asarray(valid, value.dtype), value.shape)
    return value
