"""What RNNSearch and the Transformer in NumPy have in common: checks, parameters and translations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rmsnorm.nematus import beam, sentences
from rmsnorm.nematus.beam import Translations
from rmsnorm.nematus.dialects import first_word
from rmsnorm.nematus.numpy.parameters import Array, Dropout, Parameters

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


class Model:
    """A model whose arithmetic is all float64."""

    # begin(p, config, x, mask, beam_size): what a search needs before the first word, with beam_size rows for every
    # sentence, memory and states. decode_step(p, config, memory, states, words): log-probabilities of the words after
    # these ids, and the new states.
    _begin: ClassVar[Any]
    _decode_step: ClassVar[Any]

    def __init__(self, config: Config, parameters: Mapping[str, Any]) -> None:
        self.config = config
        self.parameters = {name: np.asarray(value, np.float64) for name, value in parameters.items()}

    def translate(
        self,
        x: Any,
        x_mask: Any,
        beam_size: int | None = None,
        max_length: int | None = None,
        *,
        normalization_alpha: float | None = None,
    ) -> Translations:
        """See protocol.Model.translate."""
        p, config = self._parameters(), self.config
        ids, mask = sentences.source("translate", x, x_mask, config)
        plan = beam.plan(config, (mask != 0).sum(axis=0), beam_size, max_length, normalization_alpha)
        memory, states = self._begin(p, config, ids, mask, plan.beam_size)
        first = np.full(len(plan.lengths) * plan.beam_size, first_word(config))

        def step(states: list[Array], previous: Any) -> tuple[Array, list[Array]]:
            words = first if beam.is_first(config, previous) else previous
            return self._decode_step(p, config, memory, states, words)

        return beam.search(plan, step, states)

    def _parameters(self, dropout: Dropout | None = None) -> Parameters:
        return Parameters(self.parameters, self.config.norm, eps=self.config.eps, dropout=dropout)

    def _sentences(self, op: str, x: Any, x_mask: Any, y: Any, y_mask: Any = None) -> tuple[Array, Array, Array, Array]:
        """Ids and masks of the source and of the target."""
        config = self.config
        ids, mask = sentences.source(op, x, x_mask, config)
        return ids, mask, *sentences.target(op, y, y_mask, ids.shape[2], config)
