"""The methods of RNNSearch and the Transformer, for modules of any framework that can run a network of models/."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from rmsnorm.nematus.beam import Translations
from rmsnorm.nematus.models import search
from rmsnorm.nematus.models.operations import Array

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


class Shell:
    """A model that checks its batches, and then computes what its network describes.

    Attributes:
        network: the module rnnsearch or transformer of models/.
        operations, sentences: those modules of the framework.
    """

    network: ClassVar[Any]
    operations: ClassVar[Any]
    sentences: ClassVar[Any]
    config: Config

    def runner(self, *, training: bool) -> tuple[Callable[..., Any], Any]:
        """What calls a function of the network with the parameters as they are now, with dropout in training.

        Also what ids and masks are made for: a parameter, or the dtype of the parameters.
        """
        raise NotImplementedError

    def is_training(self) -> bool:
        """Whether the model is in training mode."""
        raise NotImplementedError

    def compute(self, name: str, training: bool, x: Any, x_mask: Any, *target: Any, **options: Any) -> Array:
        """The result of the method of this name."""
        run, like = self.runner(training=training)
        batch = self.sentences.source(name, x, x_mask, self.config, like)
        if name == "encode":
            return run(self.network.encode, *batch)
        y, *y_mask = target
        words, mask = self.sentences.target(name, y, batch[0].shape[2], self.config, like, *y_mask)
        if name == "logits":
            return run(self.network.score, *batch, words, **options)
        return run(self.network.loss, *batch, words, mask, training=training)

    def encode(self, x: Any, x_mask: Any) -> Array:
        """See protocol.RNNSearch and protocol.Transformer."""
        return self.compute("encode", self.is_training(), x, x_mask)

    def logits(self, x: Any, x_mask: Any, y: Any) -> Array:
        """See protocol.RNNSearch and protocol.Transformer."""
        return self.compute("logits", self.is_training(), x, x_mask, y)

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> Array:
        """See protocol.RNNSearch and protocol.Transformer."""
        return self.compute("loss", self.is_training(), x, x_mask, y, y_mask)

    def translate(
        self,
        x: Any,
        x_mask: Any,
        beam_size: int | None = None,
        max_length: int | None = None,
        *,
        normalization_alpha: float | None = None,
    ) -> Translations:
        """See protocol.RNNSearch and protocol.Transformer."""
        run, like = self.runner(training=False)
        ids, mask = self.sentences.source("translate", x, x_mask, self.config, like)
        return search.translate(
            self.network, self.config, self.operations, run, ids, mask, beam_size, max_length, normalization_alpha
        )
