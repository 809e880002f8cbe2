"""The base class of RNNSearch and the Transformer: a module that computes what a network of models/ describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from rmsnorm.nematus.beam import Translations
from rmsnorm.nematus.models.parameters import Parameters
from rmsnorm.nematus.models.search import translate
from rmsnorm.nematus.torch import operations, sentences
from rmsnorm.nematus.torch.parameters import Named

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


class Model(Named):
    """A module for batches (x, x_mask, y, y_mask), whose call is the loss of each sentence."""

    network: ClassVar[Any]  # rnnsearch or transformer of models/

    def __init__(self, config: Config, parameters: Mapping[str, Any]) -> None:
        super().__init__(parameters)
        self.config = config
        self.eval()

    def forward(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> Tensor:
        """The loss, for wrappers that train a module."""
        return self.loss(x, x_mask, y, y_mask)

    def encode(self, x: Any, x_mask: Any) -> Tensor:
        """See protocol.RNNSearch and protocol.Transformer."""
        return self._with_parameters(self.training)(self.network.encode, *self._source("encode", x, x_mask))

    def logits(self, x: Any, x_mask: Any, y: Any) -> Tensor:
        """See protocol.RNNSearch and protocol.Transformer."""
        batch = self._sentences("logits", x, x_mask, y)
        return self._with_parameters(self.training)(self.network.score, *batch[:3])

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> Tensor:
        """See protocol.RNNSearch and protocol.Transformer."""
        batch = self._sentences("loss", x, x_mask, y, y_mask)
        return self._with_parameters(self.training)(self.network.loss, *batch, training=self.training)

    @torch.no_grad()
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
        run, batch = self._with_parameters(training=False), self._source("translate", x, x_mask)
        return translate(self.network, self.config, operations, run, *batch, beam_size, max_length, normalization_alpha)

    def _with_parameters(self, training: bool) -> Callable[..., Any]:
        """What calls a function of the network with the parameters as they are now; in training with dropout."""
        config, random = self.config, True if training else None
        p = Parameters(operations, self.by_name(), config.norm, eps=config.eps, random=random)
        return lambda function, *tensors, **options: function(p, config, *tensors, **options)

    def _source(self, op: str, x: Any, x_mask: Any) -> tuple[Tensor, Tensor]:
        """Ids and mask of the source."""
        return sentences.source(op, x, x_mask, self.config, next(self.parameters()))

    def _sentences(
        self, op: str, x: Any, x_mask: Any, y: Any, y_mask: Any = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ids and masks of the source and of the target."""
        ids, mask = self._source(op, x, x_mask)
        return ids, mask, *sentences.target(op, y, ids.shape[2], self.config, next(self.parameters()), y_mask)
