"""Order embeddings as a Flax NNX module, as ``golden`` computes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from experiments.retrieval.config import Config, check_captions, check_images, check_pairs
from rmsnorm.nematus.flax_models import Named, gru
from rmsnorm.nematus.flax_operations import matmul

__all__ = ["OrderEmbedding", "contrastive_cost", "errors"]


class OrderEmbedding(Named):
    """The authors' model of captions and images: see golden.OrderEmbedding.

    In its state, the names are those of the authors' archives.

    Args:
        config, parameters: as ``experiments.retrieval.config.load`` returns them.

    Raises:
        TypeError, ValueError: a batch does not fit the configuration.

    Example:
        >>> config = Config(n_words=9, dim=4, dim_word=3, dim_image=2)
        >>> model = OrderEmbedding(config, {name: jnp.ones(shape) for name, shape in config.shapes().items()})
        >>> model.images(jnp.ones((1, 2))).tolist()
        [[0.5, 0.5, 0.5, 0.5]]
    """

    def __init__(self, config: Config, parameters: Mapping[str, Any]) -> None:
        super().__init__(parameters)
        self.config = config

    def states(self, x: Any, mask: Any) -> jax.Array:
        """States (words, batch, dim) of the encoder; those of masked words are the ones before them."""
        config, p = self.config, self.by_name()
        ids = np.zeros(x.shape, x.dtype) if isinstance(x, jax.core.Tracer) else x  # a tracer has no values to check
        check_captions(config, ids, mask)
        words = p["Wemb"][jnp.asarray(x)]
        own = {name: p[full] for name, full in config.cell().items()}
        h0 = jnp.zeros((words.shape[1], config.dim), words.dtype)
        return gru(words, h0, own, mask=jnp.asarray(mask), norm=config.norm)

    def sentences(self, x: Any, mask: Any) -> jax.Array:
        """Embeddings (batch, dim) of captions: ids x and their mask, both (words, batch)."""
        return _unit(self.config, self.states(x, mask)[-1])

    def images(self, features: Any) -> jax.Array:
        """Embeddings (batch, dim) of images: features (batch, dim_image)."""
        check_images(self.config, features)
        p = self.by_name()
        linear = matmul(jnp.asarray(features).astype(p["ff_image_W"].dtype), p["ff_image_W"]) + p["ff_image_b"]
        return _unit(self.config, linear)

    def errors(self, sentences: jax.Array, images: jax.Array) -> jax.Array:
        """Errors (sentences, images) of embeddings."""
        return errors(self.config, sentences, images)

    def cost(self, x: Any, mask: Any, features: Any) -> jax.Array:
        """The contrastive cost of captions and images, which belong together in their order."""
        return contrastive_cost(self.config, self.sentences(x, mask), self.images(features))

    __call__ = cost


def _unit(config: Config, x: jax.Array) -> jax.Array:
    """x / ‖x‖, as in the authors' program without an epsilon, and its absolute value."""
    unit = x / jnp.sqrt((x * x).sum(1, keepdims=True))
    return jnp.abs(unit) if config.abs else unit


def errors(config: Config, sentences: jax.Array, images: jax.Array) -> jax.Array:
    """Σ max(0, sentence - image)² for all pairs, (sentences, images); with the method cosine, -sentence·image."""
    if config.method == "cosine":
        return -matmul(sentences, images.T)
    # One sentence after the other: all pairs at once would be dim times as much memory as the result.
    return lax.map(lambda sentence: (jnp.maximum(0, sentence - images) ** 2).sum(1), sentences)


def contrastive_cost(config: Config, sentences: jax.Array, images: jax.Array) -> jax.Array:
    """Σ max(0, margin - error of another pair + error of the right pair) over captions and images.

    Every other image is compared for a caption, and every other caption for an image.
    """
    check_pairs(sentences, images)
    if config.method == "cosine":
        table = errors(config, sentences, images)
    else:
        table = (jnp.maximum(0, sentences[:, None] - images) ** 2).sum(2)
    right = jnp.diagonal(table)
    costs = jnp.maximum(0, config.margin - table + right[:, None]) + jnp.maximum(0, config.margin - table + right)
    return jnp.where(jnp.eye(len(table), dtype=bool), 0, costs).sum()
