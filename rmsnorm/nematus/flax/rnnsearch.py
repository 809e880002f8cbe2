"""RNNSearch as Nematus computes it, as a Flax NNX module: scores, losses and translations."""

from __future__ import annotations

from typing import Any, ClassVar

from rmsnorm.nematus import protocol
from rmsnorm.nematus.flax.model import Model
from rmsnorm.nematus.models import rnnsearch

__all__ = ["RNNSearch"]


class RNNSearch(Model, protocol.RNNSearch):
    """Nematus's attentional encoder-decoder: see rmsnorm.nematus.protocol.RNNSearch.

    A new model is in evaluation mode. In its state, Nematus's names are paths. The stream ``dropout`` of ``rngs``,
    which training with dropout needs, is forked.

    Example:
        >>> from jax import numpy as jnp
        >>> from rmsnorm.nematus.config import Config
        >>> from rmsnorm.nematus.names import variables
        >>> config = Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3)
        >>> model = RNNSearch(config, {row.name: jnp.zeros(row.shape) for row in variables(config)})
        >>> x, y = jnp.array([[[3], [2], [0]]]), jnp.array([[1], [0]])
        >>> round(model.loss(x, jnp.ones((3, 1)), y, jnp.ones((2, 1))).item(), 4)  # 2 log 3
        2.1972
    """

    network: ClassVar[Any] = rnnsearch
