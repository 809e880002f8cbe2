"""Order embeddings in NumPy: the golden, with analytic gradients. The dtype is that of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.retrieval.config import Config, check_captions, check_images, check_pairs
from rmsnorm.nematus.numpy.parameters import Array, Parameters, Pullback, project, rows
from rmsnorm.nematus.numpy.recurrent import gru, gru_vjp

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
        return self._states(Parameters(self.parameters), x, mask)[0]

    def sentences(self, x: Any, mask: Any) -> Array:
        """Embeddings (batch, dim) of captions: ids x and their mask, both (words, batch)."""
        return self._sentences(Parameters(self.parameters), x, mask)[0]

    def images(self, features: Any) -> Array:
        """Embeddings (batch, dim) of images: features (batch, dim_image)."""
        return self._images(Parameters(self.parameters), features)[0]

    def errors(self, sentences: Array, images: Array) -> Array:
        """Errors (sentences, images) of embeddings."""
        return errors(self.config, sentences, images)

    def cost(self, x: Any, mask: Any, features: Any) -> Any:
        """The contrastive cost of captions and images, which belong together in their order."""
        return contrastive_cost(self.config, self.sentences(x, mask), self.images(features))[0]

    def gradients(self, x: Any, mask: Any, features: Any) -> dict[str, Array]:
        """The gradients of the cost, by the names of the parameters."""
        p = Parameters(self.parameters)
        sentences, sentences_pullback = self._sentences(p, x, mask)
        images, images_pullback = self._images(p, features)
        _, dsentences, dimages = contrastive_cost(self.config, sentences, images)
        sentences_pullback(dsentences)
        images_pullback(dimages)
        return p.gradients

    def _states(self, p: Parameters, x: Any, mask: Any) -> tuple[Array, Pullback]:
        config = self.config
        check_captions(config, x, mask)
        ids, table = np.asarray(x), p["Wemb"]
        names = config.cell()
        own = {name: p[full] for name, full in names.items()}
        words, h0 = table[ids], np.zeros((ids.shape[1], config.dim), table.dtype)
        options: dict[str, Any] = {"mask": np.asarray(mask, table.dtype), "norm": config.norm}

        def pullback(dstates: Array) -> Array:
            dwords, dh0, gradients = gru_vjp(dstates, words, h0, own, **options)
            for name, gradient in gradients.items():
                p.add(names[name], gradient)
            dtable = np.zeros_like(table)
            np.add.at(dtable, ids.ravel(), rows(dwords))
            p.add("Wemb", dtable)
            return dh0

        return gru(words, h0, own, **options), pullback

    def _sentences(self, p: Parameters, x: Any, mask: Any) -> tuple[Array, Pullback]:
        states, states_pullback = self._states(p, x, mask)
        y, unit_pullback = _unit(self.config, states[-1])

        def pullback(dy: Array) -> Array:
            dstates = np.zeros_like(states)
            dstates[-1] = unit_pullback(dy)
            return states_pullback(dstates)

        return y, pullback

    def _images(self, p: Parameters, features: Any) -> tuple[Array, Pullback]:
        check_images(self.config, features)
        linear, linear_pullback = project(p, np.asarray(features, p["Wemb"].dtype), "ff_image_W", "ff_image_b", None)
        y, unit_pullback = _unit(self.config, linear)
        return y, lambda dy: linear_pullback(unit_pullback(dy))


def _unit(config: Config, x: Array) -> tuple[Array, Pullback]:
    """x / ‖x‖, as in the authors' program without an epsilon, and its absolute value."""
    norm = np.sqrt((x * x).sum(axis=1, keepdims=True))
    unit = x / norm

    def pullback(dy: Array) -> Array:
        dunit = dy * np.sign(unit) if config.abs else dy
        return (dunit - unit * (unit * dunit).sum(axis=1, keepdims=True)) / norm

    return np.abs(unit) if config.abs else unit, pullback


def errors(config: Config, sentences: Array, images: Array) -> Array:
    """Σ max(0, sentence - image)² for all pairs, (sentences, images); with the method cosine, -sentence·image."""
    if config.method == "cosine":
        return -sentences @ images.T
    return np.stack([(np.maximum(0, sentence - images) ** 2).sum(axis=1) for sentence in sentences])


def contrastive_cost(config: Config, sentences: Array, images: Array) -> tuple[Any, Array, Array]:
    """Σ max(0, margin - error of another pair + error of the right pair) over captions and images; and its gradients.

    Every other image is compared for a caption, and every other caption for an image.
    """
    check_pairs(sentences, images)
    table = errors(config, sentences, images)
    right, others = np.diagonal(table), ~np.eye(len(table), dtype=bool)
    margin = np.asarray(config.margin, table.dtype)
    costs = [np.where(others, margin - table + own, 0) for own in (right[:, None], right)]
    wrong = [(cost > 0).astype(table.dtype) for cost in costs]
    dtable = -wrong[0] - wrong[1] + np.diag(wrong[0].sum(axis=1) + wrong[1].sum(axis=0))
    if config.method == "cosine":
        dsentences, dimages = -dtable @ images, -dtable.T @ sentences
    else:
        violations = 2 * dtable[..., None] * np.maximum(0, sentences[:, None] - images)
        dsentences, dimages = violations.sum(axis=1), -violations.sum(axis=0)
    return sum(np.maximum(0, cost).sum() for cost in costs), dsentences, dimages
