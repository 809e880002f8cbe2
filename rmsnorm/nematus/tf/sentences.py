"""Batches of sentences as tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from rmsnorm.nematus import sentences
from rmsnorm.nematus.dialects import rules

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


def source(op: str, x: Any, x_mask: Any, config: Config, dtype: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Ids (factors, length, batch), checked against the sizes of the vocabularies, and their mask (length, batch)."""
    if tf.executing_eagerly():  # in a graph there are no values to check
        x, x_mask = sentences.source(op, x, x_mask, config)
    return tf.cast(x, tf.int64), tf.cast(x_mask, dtype)


def target(op: str, y: Any, batch: Any, config: Config, dtype: Any, y_mask: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Ids (length, batch), checked against the size of the vocabulary, and their mask."""
    if tf.executing_eagerly():
        y, y_mask = sentences.target(op, y, batch, config, y_mask)
    words = tf.cast(y, tf.int64)
    if y_mask is None:
        y_mask = words != 0 if rules(config).pads_with_zero else tf.ones_like(words)
    return words, tf.cast(y_mask, dtype)
