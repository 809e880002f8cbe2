"""The order embeddings of the authors' Theano program as a Flax NNX module, with the options that the paper has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from rmsnorm.nematus.cells import Shapes, cell_shapes
from rmsnorm.nematus.config import Norm
from rmsnorm.nematus.flax_models import Named, gru
from rmsnorm.nematus.flax_operations import matmul


@dataclass(frozen=True)
class Config:
    """Sizes, norm and margin of an order embedding.

    Attributes:
        words: size of the vocabulary.
        width, embedding, features: sizes of an embedding of a caption or an image, of a word, and of an image.
        norm: of the GRU that reads captions.
        margin: of the contrastive cost.
    """

    words: int
    width: int
    embedding: int
    features: int
    norm: Norm
    margin: float = 0.05

    def shapes(self) -> Shapes:
        """Shapes of all parameters, by the names of the authors' archives."""
        cell = cell_shapes("gru", self.embedding, self.width, self.norm)
        shapes: Shapes = {"Wemb": (self.words, self.embedding)}
        shapes |= {f"encoder_{name}": shape for name, shape in cell.items()}
        return shapes | {"ff_image_W": (self.features, self.width), "ff_image_b": (self.width,)}


class OrderEmbedding(Named):
    """The authors' model of captions and images; its parameters have the names of their archives.

    s = |h / ‖h‖|, h the last state of a GRU;   im = |e / ‖e‖|, e = image W + b
    error(s, im) = Σ max(0, s - im)²
    """

    def __init__(self, config: Config, parameters: Mapping[str, Any]) -> None:
        super().__init__(parameters)
        self.config = config

    def states(self, x: Any, mask: Any) -> jax.Array:
        """States (words, batch, width) of the encoder; those of masked words are the ones before them."""
        p = self.by_name()
        words = p["Wemb"][jnp.asarray(x)]
        own = {name.removeprefix("encoder_"): value for name, value in p.items() if name.startswith("encoder_")}
        h0 = jnp.zeros((words.shape[1], self.config.width), words.dtype)
        return gru(words, h0, own, mask=jnp.asarray(mask), norm=self.config.norm)

    def sentences(self, x: Any, mask: Any) -> jax.Array:
        """Embeddings (batch, width) of captions: ids x and their mask, both (words, batch)."""
        return _unit(self.states(x, mask)[-1])

    def images(self, features: Any) -> jax.Array:
        """Embeddings (batch, width) of images: features (batch, features)."""
        p = self.by_name()
        return _unit(matmul(jnp.asarray(features).astype(p["ff_image_W"].dtype), p["ff_image_W"]) + p["ff_image_b"])

    def errors(self, sentences: jax.Array, images: jax.Array) -> jax.Array:
        """Σ max(0, sentence - image)² for all pairs of embeddings, (sentences, images)."""
        # One sentence after the other: all pairs at once would be width times as much memory as the result.
        return lax.map(lambda sentence: (jnp.maximum(0, sentence - images) ** 2).sum(1), sentences)

    def cost(self, x: Any, mask: Any, features: Any) -> jax.Array:
        """Σ max(0, margin - error of another pair + error of the right pair) over captions and images.

        Captions and images belong together in their order. Every other image is compared for a caption, and every
        other caption for an image.
        """
        sentences, images, margin = self.sentences(x, mask), self.images(features), self.config.margin
        table = (jnp.maximum(0, sentences[:, None] - images) ** 2).sum(2)
        right = jnp.diagonal(table)
        costs = jnp.maximum(0, margin - table + right[:, None]) + jnp.maximum(0, margin - table + right)
        return jnp.where(jnp.eye(len(table), dtype=bool), 0, costs).sum()


def _unit(x: jax.Array) -> jax.Array:
    """|x / ‖x‖|, as in the authors' program without an epsilon."""
    return jnp.abs(x / jnp.sqrt((x * x).sum(1, keepdims=True)))
