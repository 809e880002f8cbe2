"""RNNSearch as Nematus computes it, as a Keras model: scores, losses and translations."""

from __future__ import annotations

from typing import Any, ClassVar

import keras
import tensorflow as tf

from rmsnorm.nematus import protocol
from rmsnorm.nematus.models import rnnsearch
from rmsnorm.nematus.tf.model import NematusModel

__all__ = ["RNNSearch"]


@keras.saving.register_keras_serializable(package="rmsnorm")
class RNNSearch(NematusModel, protocol.RNNSearch):
    """Nematus's attentional encoder-decoder: see rmsnorm.nematus.protocol.RNNSearch.

    ``training=True`` turns dropout on. The weights have Nematus's names with dots for slashes.

    Example:
        >>> from rmsnorm.nematus.config import Config
        >>> from rmsnorm.nematus.names import variables
        >>> config = Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3)
        >>> model = RNNSearch(config, {row.name: tf.zeros(row.shape) for row in variables(config)})
        >>> x, y = tf.constant([[[3], [2], [0]]]), tf.constant([[1], [0]])
        >>> model.loss(x, tf.ones((3, 1)), y, tf.ones((2, 1))).numpy()  # 2 log 3
        array([2.1972246], dtype=float32)
    """

    network: ClassVar[Any] = rnnsearch

    def logits(self, x: Any, x_mask: Any, y: Any, *, stepwise: bool = False, training: bool = False) -> tf.Tensor:
        """See protocol.RNNSearch."""
        return self.compute("logits", x, x_mask, y, stepwise=stepwise, training=training)
