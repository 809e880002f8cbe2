"""Nematus's Transformer as a Keras model: scores, losses and translations.

Logits and the output of the encoder are batch-major, as in Nematus.
"""

from __future__ import annotations

from typing import Any, ClassVar

import keras

from rmsnorm.nematus import protocol
from rmsnorm.nematus.models import transformer
from rmsnorm.nematus.tf.model import NematusModel

__all__ = ["Transformer"]


@keras.saving.register_keras_serializable(package="rmsnorm")
class Transformer(NematusModel, protocol.Transformer):
    """Nematus's Transformer: see rmsnorm.nematus.protocol.Transformer.

    ``training=True`` turns dropout and label smoothing on. The weights have Nematus's names with dots for slashes.

    Example:
        >>> import tensorflow as tf
        >>> from rmsnorm.nematus.config import Config
        >>> from rmsnorm.nematus.names import variables
        >>> sizes = {"embedding_size": 4, "state_size": 4, "source_vocab_sizes": (4,), "target_vocab_size": 3}
        >>> config = Config(**sizes, model_type="transformer", norm="rms", transformer_num_heads=2)
        >>> model = Transformer(config, {row.name: tf.zeros(row.shape) for row in variables(config)})
        >>> x, y = tf.constant([[[3], [2], [0]]]), tf.constant([[1], [0]])
        >>> model.loss(x, tf.ones((3, 1)), y, tf.ones((2, 1))).numpy()  # 2 log 3
        array([2.1972246], dtype=float32)
    """

    network: ClassVar[Any] = transformer
