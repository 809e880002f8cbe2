"""Order embeddings in NumPy: the golden. The dtype is that of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.retrieval.config import Config, check_captions, check_images, check_pairs
from rmsnorm.nematus.numpy_models import gru
from rmsnorm.nematus.numpy_operations import Array

__all__ = ["OrderEmbedding", "contrastive_cost", "errors"]


class OrderEmbedding:
    """The authors' model of captions and images.

    s = |h / ‖h‖|, h the last state of a GRU;   im = |e / ‖e‖|, e = image W + b
    error(s, im) = Σ max(0, s - im)²;   with the method cosine: -s·im

    Args:
        config, parameters: as ``experiments.retrieval.config.load`` returns them.

    Raises:
        TypeError, ValueError: a batch does not fit the configuration.
    """

    def __init__(self, config: Config, parameters: Mapping[str, Any]) -> None:
        self.config, self.parameters = config, dict(parameters)

    def states(self, x: Any, mask: Any) -> Array:
        """States (words, batch, dim) of the encoder; those of masked words are the ones before them."""
        return self._states(self.parameters, x, mask)

    def sentences(self, x: Any, mask: Any) -> Array:
        """Embeddings (batch, dim) of captions: ids x and their mask, both (words, batch)."""
        return _unit(self.config, self.states(x, mask)[-1])

    def images(self, features: Any) -> Array:
        """Embeddings (batch, dim) of images: features (batch, dim_image)."""
        check_images(self.config, features)
        p = self.parameters
        return _unit(self.config, np.asarray(features, p["Wemb"].dtype) @ p["ff_image_W"] + p["ff_image_b"])

    def errors(self, sentences: Array, images: Array) -> Array:
        """Errors (sentences, images) of embeddings."""
        return errors(self.config, sentences, images)

    def cost(self, x: Any, mask: Any, features: Any) -> Any:
        """The contrastive cost of captions and images, which belong together in their order."""
        return contrastive_cost(self.config, self.sentences(x, mask), self.images(features))

    def _states(self, p: Mapping[str, Array], x: Any, mask: Any) -> Array:
        config = self.config
        check_captions(config, x, mask)
        ids, table = np.asarray(x), p["Wemb"]
        own = {name: p[full] for name, full in config.cell().items()}
        h0 = np.zeros((ids.shape[1], config.dim), table.dtype)
        return gru(table[ids], h0, own, mask=np.asarray(mask, table.dtype), norm=config.norm)


def _unit(config: Config, x: Array) -> Array:
    """x / ‖x‖, as in the authors' program without an epsilon, and its absolute value."""
    unit = x / np.sqrt((x * x).sum(axis=1, keepdims=True))
    return np.abs(unit) if config.abs else unit


def errors(config: Config, sentences: Array, images: Array) -> Array:
    """Σ max(0, sentence - image)² for all pairs, (sentences, images); with the method cosine, -sentence·image."""
    if config.method == "cosine":
        return -sentences @ images.T
    return np.stack([(np.maximum(0, sentence - images) ** 2).sum(axis=1) for sentence in sentences])


def contrastive_cost(config: Config, sentences: Array, images: Array) -> Any:
    """Σ max(0, margin - error of another pair + error of the right pair) over captions and images.

    Every other image is compared for a caption, and every other caption for an image.
    """
    check_pairs(sentences, images)
    table = errors(config, sentences, images)
    right, others = np.diagonal(table), ~np.eye(len(table), dtype=bool)
    margin = np.asarray(config.margin, table.dtype)
    costs = [np.where(others, margin - table + own, 0) for own in (right[:, None], right)]
    return sum(np.maximum(0, cost).sum() for cost in costs)
