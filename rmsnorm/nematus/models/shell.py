"""The methods of RNNSearch and the Transformer, for modules of any framework that can run a network of models/."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as bind
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rmsnorm.nematus import beam, protocol, sentences
from rmsnorm.nematus.dialects import first_word, rules
from rmsnorm.nematus.models.operations import Array

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


class Shell(protocol.Model):
    """A model that checks its batches, and then computes what its network describes.

    Attributes:
        network: the module rnnsearch or transformer of models/.
        operations: that module of the framework.
    """

    network: ClassVar[Any]
    operations: ClassVar[Any]
    config: Config

    def runner(self, *, training: bool) -> tuple[Callable[..., Any], Any]:
        """What calls a function of the network with the parameters as they are now, with dropout in training.

        Also a parameter.
        """
        raise NotImplementedError

    def is_training(self) -> bool:
        """Whether the model is in training mode."""
        raise NotImplementedError

    def compute(
        self, name: str, x: Any, x_mask: Any, *target: Any, training: bool | None = None, **options: Any
    ) -> Array:
        training = self.is_training() if training is None else training
        run, like = self.runner(training=training)
        batch = self._source(name, x, x_mask, like)
        if name == "encode":
            return run(self.network.encode, *batch)
        y, *y_mask = target
        words, mask = self._target(name, y, batch[0].shape[2], like, *y_mask)
        if name == "logits":
            return run(self.network.score, *batch, words, **options)
        return run(self.network.loss, *batch, words, mask, training=training)

    def search(self, x: Any, x_mask: Any, *how: Any) -> beam.Translations:
        (run, like), ops, config = self.runner(training=False), self.operations, self.config
        ids, mask = self._source("translate", x, x_mask, like)
        plan = beam.plan(config, ops.to_host(mask != 0).sum(axis=0), *how)
        rows, length = len(plan.lengths) * plan.beam_size, plan.steps if ops.FIXED_CACHES else 0
        memory, states = run(self.network.begin, ids, mask, beam_size=plan.beam_size, length=length)
        times = count()

        def step(states: list[Array], previous: Any) -> tuple[Any, list[Array]]:
            words = np.full(rows, first_word(config)) if beam.is_first(config, previous) else previous
            log_p, states = run(self.network.step, memory, states, ops.as_ids(words, like), next(times))
            return ops.to_host(log_p), states

        return beam.search(plan, step, states, ops.rows)

    def _source(self, op: str, x: Any, x_mask: Any, like: Any) -> tuple[Array, Array]:
        """Ids (factors, length, batch), checked against the sizes of the vocabularies, and their mask."""
        ops, check = self.operations, bind(sentences.source, op, config=self.config)
        ids, mask = ops.checked(check, x, x_mask)
        return ops.as_ids(ids, like), ops.as_mask(mask, like)

    def _target(self, op: str, y: Any, batch: Any, like: Any, y_mask: Any = None) -> tuple[Array, Array]:
        """Ids (length, batch), checked against the size of the vocabulary, and their mask."""
        ops, check = self.operations, bind(sentences.target, op, batch=batch, config=self.config)
        ids, mask = ops.checked(check, y, y_mask)
        words = ops.as_ids(ids, like)
        if mask is None:
            mask = words != 0 if rules(self.config).pads_with_zero else words >= 0
        return words, ops.as_mask(mask, like)
