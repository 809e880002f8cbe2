"""What RNNSearch and the Transformer in NumPy have in common: checks, parameters and translations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rmsnorm.nematus import beam, protocol, sentences
from rmsnorm.nematus.dialects import first_word, label_target
from rmsnorm.nematus.numpy.output import losses
from rmsnorm.nematus.numpy.parameters import Array, Dropout, Parameters

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


class Model(protocol.Model):
    """A model whose arithmetic is all float64."""

    # encode(p, config, x, mask): what the decoder attends to. score(p, config, x, mask, y): logits of the words y.
    # begin(p, config, x, mask, beam_size): what a search needs before the first word, with beam_size rows for every
    # sentence, memory and states. decode_step(p, config, memory, states, words): log-probabilities of the words after
    # these ids, and the new states.
    _encode: ClassVar[Any]
    _score: ClassVar[Any]
    _begin: ClassVar[Any]
    _decode_step: ClassVar[Any]

    def __init__(self, config: Config, parameters: Mapping[str, Any]) -> None:
        self.config = config
        self.parameters = {name: np.asarray(value, np.float64) for name, value in parameters.items()}

    def compute(
        self, name: str, x: Any, x_mask: Any, y: Any = None, y_mask: Any = None, *, dropout: Dropout | None = None,
        training: bool = False, **options: Any,
    ) -> Array:  # fmt: skip
        """The result of the method of this name."""
        p, config = self._parameters(dropout), self.config
        ids, mask = sentences.source(name, x, x_mask, config)
        if name == "encode":
            return self._encode(p, config, ids, mask)
        words, words_mask = sentences.target(name, y, y_mask, ids.shape[2], config)
        logits: Array = self._score(p, config, ids, mask, words, **options)
        if name == "logits":
            return logits
        time_major = logits.swapaxes(0, 1) if config.model_type == "transformer" else logits
        return losses(config, time_major, words, words_mask, label_target(config, training=training))

    def search(self, x: Any, x_mask: Any, *how: Any) -> beam.Translations:
        p, config = self._parameters(), self.config
        ids, mask = sentences.source("translate", x, x_mask, config)
        plan = beam.plan(config, (mask != 0).sum(axis=0), *how)
        memory, states = self._begin(p, config, ids, mask, plan.beam_size)
        first = np.full(len(plan.lengths) * plan.beam_size, first_word(config))

        def step(states: list[Array], previous: Any) -> tuple[Array, list[Array]]:
            words = first if beam.is_first(config, previous) else previous
            return self._decode_step(p, config, memory, states, words)

        return beam.search(plan, step, states)

    def _parameters(self, dropout: Dropout | None = None) -> Parameters:
        return Parameters(self.parameters, self.config.norm, eps=self.config.eps, dropout=dropout)
