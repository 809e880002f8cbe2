"""The parts of the models: parameters by name, with the norm and the dropout of a model, projections, losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, get_args

from rmsnorm.nematus.config import Config, Norm
from rmsnorm.nematus.dialects import NOTHING, ZERO_BIAS
from rmsnorm.nematus.models.operations import Array, Operations
from rmsnorm.nematus.names import Use, leaves, table
from rmsnorm.specification import errors

PARTIAL: Final = 0.0625  # of pRMSNorm in the paper


def check_norm(norm: str) -> None:
    """Raise ValueError if a model or a cell cannot have this norm."""
    if norm not in get_args(Norm):
        raise errors.not_a_choice("recurrent", "norm", norm, get_args(Norm))


def first_word(config: Config) -> int:
    """The id that precedes the first word of the target."""
    return config.rules.go if config.model_type == "transformer" else NOTHING


def label_target(config: Config, *, training: bool) -> tuple[float, float, float]:
    """The target of label smoothing at the right word and at others, and what is subtracted from the loss of a word.

    A Transformer smooths in training only. All but Nematus's RNNSearch subtract the smallest loss that is possible.
    """
    rate, size = config.label_smoothing, config.target_vocab_size
    if config.model_type == "rnn" and not config.rules.is_zero:
        wrong = rate / size
        return 1 - rate + wrong, wrong, 0.0
    if config.model_type == "transformer" and not training:
        rate = 0.0
    right, wrong = 1.0 - rate, rate / (size - 1)
    return right, wrong, -right * math.log(right) - rate * math.log(wrong + 1e-20) if rate else 0.0


@dataclass
class Parameters:
    """Arrays of a model: ``p["W"]`` is an array, ``p / "gru0"`` are the arrays below that name.

    Attributes:
        ops: the operations of the framework.
        norm, partial, eps: of the model.
        random: what the framework draws from in training, else None.
        masks: those of Nematus's dropout after Gal & Ghahramani, by the names of what they are multiplied with: one for
            the input of each matrix, the same in all steps of a sequence.
    """

    ops: Operations
    values: Mapping[str, Array]
    norm: Norm = "none"
    _: KW_ONLY
    partial: float = PARTIAL
    eps: float = 1e-5  # of Nematus and of the authors' layers.py
    random: Any = None
    scope: str = ""
    masks: dict[str, Array] = field(default_factory=dict)
    below: dict[str, Parameters] = field(default_factory=dict)

    def __truediv__(self, name: str) -> Parameters:
        if name not in self.below:  # once, and not in every step
            own = self.below[name] = copy(self)
            own.scope, own.below = f"{self.scope}{name}/", {}
        return self.below[name]

    def __getitem__(self, name: str) -> Array:
        return self.values[self.scope + name]

    def get(self, name: str) -> Array | None:
        return self.values.get(self.scope + name)

    def drop(self, name: str, x: Array) -> Array:
        """x times the mask of that name, if there is one."""
        name = self.scope + name
        return x * self.masks[name] if name in self.masks else x

    def dropout(self, x: Array, rate: float) -> Array:
        """x without some of its features, in training."""
        return self.ops.dropout(x, rate, self.random) if rate and self.random is not None else x


def normalise(p: Parameters, x: Array, gain: str, offset: str | None, norm: Norm | None = None) -> Array:
    """The norm over the last axis: x / sqrt(mean(x^2) + eps) * gain + offset; LayerNorm takes x - mean(x) as x.

    norm: by default that of the model.
    """
    norm = norm or p.norm
    if norm == "none":
        return x
    bias = None if offset is None else p.get(offset)
    if norm == "layer":
        return p.ops.layer_norm(x, p[gain], bias, p.eps)
    return p.ops.rms_norm(x, p[gain], bias, eps=p.eps, partial=p.partial if norm == "prms" else None)


def project(p: Parameters, x: Array, weight: str, bias: str | None, norm: tuple[str, str] | str | None = None) -> Array:
    """norm(x W + b); a bias or a norm of None is left out.

    norm: names of the gain and the offset, or the scope below which they have Nematus's names.
    """
    y = p.ops.matmul(p.drop(weight, x), p[weight])
    if bias is not None:
        y = y + p[bias]
    if norm is None:
        return y
    return normalise(p, y, *(leaves(p.norm, norm) if isinstance(norm, str) else norm))


def feed_forward(p: Parameters, x: Array, *, norm: bool = True) -> Array:
    """norm(x W + b); the variables of the norm are directly below the name of the layer."""
    return project(p, x, "W", "b", "" if norm else None)


def embed(p: Parameters, config: Config, use: Use, ids: Array, scale: float = 1.0) -> Array:
    """Embeddings of words, given the ids of each factor; zeros where nothing precedes a word."""
    ops = p.ops
    count = len(config.source_vocab_sizes) if use == "encoder" else 1
    factors = [ops.take(p[table(config, use, i)], ids[i]) for i in range(count)]
    words = (ops.concatenated(factors, -1) if count > 1 else factors[0]) * scale
    if config.rules.is_zero:
        words = words + p[ZERO_BIAS]
    has_nothing = use == "decoder" and first_word(config) == NOTHING
    return ops.where((ids[0] != NOTHING)[..., None], words, 0.0) if has_nothing else words


def softmax(p: Parameters, x: Array, axis: int) -> Array:
    """Weights, divided by their sum once more.

    That it is 1 up to a rounding is not enough for the gradient: it is a difference, in which what all values have in
    common must cancel.
    """
    weights = p.ops.softmax(x, axis)
    return weights / p.ops.sum(weights, axis, keepdims=True)


def masked_scores(p: Parameters, config: Config, mask: Array) -> Array:
    """What is added to the scores of attention to the source: minus infinity in float16, which has not -1e9."""
    return p.ops.where(mask != 0, 0 * mask, config.masked_score)


def losses(p: Parameters, config: Config, logits: Array, y: Array, mask: Array, axis: int, *, training: bool) -> Array:
    """The losses of sentences, whose words are along an axis."""
    right, wrong, smallest = label_target(config, training=training)
    log_p = p.ops.log_softmax(logits)
    of_words = (wrong - right) * p.ops.picked(log_p, y)
    if wrong:
        of_words = of_words - wrong * p.ops.sum(log_p, -1)
    mask = p.ops.cast(mask, of_words)
    loss = p.ops.sum((of_words - smallest) * mask, axis)
    return loss / p.ops.sum(mask, axis) if config.rules.is_zero else loss  # a mean over the words, or their sum
