"""The parts of the recurrent models and the Transformer: parameters by name, the norm, projections, and losses.

The arithmetic is NumPy's in the dtype of the arguments, like that of the original programs: so the norm is a few lines
here and not the double-double golden, which takes a thousand times as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rmsnorm.nematus import cells
from rmsnorm.nematus.cells import EPS, PARTIAL, CellNorm, check_norm
from rmsnorm.nematus.dialects import Use, label_target, rules, table
from rmsnorm.nematus.rules import NOTHING, ZERO_BIAS
from rmsnorm.specification.variants import Variant

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

Array: TypeAlias = npt.NDArray[Any]


@dataclass
class Parameters:
    """Arrays and the norm of a model: ``p["W"]`` is an array, ``p / "gru0"`` are the arrays below that name."""

    values: Mapping[str, Array]
    norm: CellNorm = "none"
    _: KW_ONLY
    partial: float = PARTIAL
    eps: float = EPS
    scope: str = ""

    def __post_init__(self) -> None:
        check_norm(self.norm)

    def __truediv__(self, name: str) -> Parameters:
        scope = f"{self.scope}{name}/"
        return Parameters(self.values, self.norm, partial=self.partial, eps=self.eps, scope=scope)

    def __getitem__(self, name: str) -> Array:
        return self.values[self.scope + name]

    def __contains__(self, name: str) -> bool:
        return self.scope + name in self.values


def normalise(p: Parameters, x: Array, gain: str, offset: str | None, norm: CellNorm | None = None) -> Array:
    """The norm over the last axis: x / sqrt(mean(x^2) + eps) * gain + offset; LayerNorm takes x - mean(x) as x.

    norm: by default that of the model.
    """
    norm = norm or p.norm
    if norm == "none":
        return x
    n = x.shape[-1]
    k = Variant.get("theano").replace(partial=p.partial).counted(n) if norm == "prms" else n
    centred = x - x.mean(axis=-1, keepdims=True) if norm == "layer" else x
    rho = np.sqrt(np.mean(centred[..., :k] ** 2, axis=-1, keepdims=True) + np.asarray(p.eps, x.dtype))
    y: Array = centred / rho * p[gain]
    return y + p[offset] if offset is not None and offset in p else y


def project(p: Parameters, x: Array, weight: str, bias: str | None, norm: tuple[str, str] | str | None = None) -> Array:
    """norm(x W + b); a bias or a norm of None is left out.

    norm: names of the gain and the offset, or the scope below which they have Nematus's names.
    """
    y: Array = x @ p[weight] if bias is None else x @ p[weight] + p[bias]
    if norm is None:
        return y
    return normalise(p, y, *(cells.leaves(p.norm, norm) if isinstance(norm, str) else norm))


def feed_forward(p: Parameters, x: Array, *, norm: bool = True) -> Array:
    """norm(x W + b); the variables of the norm are directly below the name of the layer."""
    return project(p, x, "W", "b", "" if norm else None)


def embed(p: Parameters, config: Config, use: Use, ids: Array, scale: float = 1.0) -> Array:
    """Embeddings of words, given the ids of each factor; the vector of no word is zero."""
    words = np.concatenate([p[table(config, use, i)][factor] for i, factor in enumerate(ids)], axis=-1) * scale
    if rules(config).embedding_bias:
        words = words + p[ZERO_BIAS]
    return words * (ids[0] != NOTHING)[..., None]


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x), computed as (1 + tanh(x / 2)) / 2, which does not overflow."""
    return (1 + np.tanh(x / 2)) / 2


def softmax(scores: Array, axis: int) -> Array:
    weights: Array = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return weights / weights.sum(axis=axis, keepdims=True)


def losses(config: Config, logits: Array, y: Array, mask: Array, *, training: bool) -> Array:
    """The losses of sentences: -sum_v target_v log p_v - smallest, summed over the words. All time-major."""
    right, wrong, smallest = label_target(config, training=training)
    wanted = np.full(logits.shape, wrong)
    np.put_along_axis(wanted, y[..., None], right, axis=-1)
    of_words = -(wanted * log_softmax(logits)).sum(axis=-1) - smallest
    loss: Array = (of_words * mask).sum(axis=0)
    return loss / mask.sum(axis=0) if rules(config).mean_loss else loss


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
