"""Batches of sentences as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from rmsnorm.nematus import sentences


def source(op: str, x: Any, x_mask: Any, sizes: Sequence[int], dtype: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Ids (factors, length, batch), checked against the sizes of the vocabularies, and their mask (length, batch)."""
    if tf.executing_eagerly():  # in a graph there are no values to check
        sentences.source(op, x, x_mask, sizes)
    return tf.cast(x, tf.int64), tf.cast(x_mask, dtype)


def target(op: str, y: Any, batch: Any, size: int, dtype: Any, y_mask: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Ids (length, batch), checked against the size of the vocabulary, and their mask."""
    if tf.executing_eagerly():
        sentences.target(op, y, batch, size, y_mask)
    words = tf.cast(y, tf.int64)
    return words, tf.ones(tf.shape(words), dtype) if y_mask is None else tf.cast(y_mask, dtype)


class Rows:
    """A tensor whose rows can be taken with ``rows[indices]``, as a beam search does."""

    def __init__(self, tensor: tf.Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, indices: Any) -> Rows:
        return Rows(tf.gather(self.tensor, indices))
