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
        run, like = self._with_parameters(self.training)
        return run(self.network.encode, *sentences.source("encode", x, x_mask, self.config, like))

    def logits(self, x: Any, x_mask: Any, y: Any) -> Tensor:
        """See protocol.RNNSearch and protocol.Transformer."""
        run, like = self._with_parameters(self.training)
        return run(self.network.score, *sentences.both("logits", x, x_mask, y, None, self.config, like)[:3])

    def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> Tensor:
        """See protocol.RNNSearch and protocol.Transformer."""
        run, like = self._with_parameters(self.training)
        batch = sentences.both("loss", x, x_mask, y, y_mask, self.config, like)
        return run(self.network.loss, *batch, training=self.training)

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
        run, like = self._with_parameters(training=False)
        batch = sentences.source("translate", x, x_mask, self.config, like)
        return translate(self.network, self.config, operations, run, *batch, beam_size, max_length, normalization_alpha)

    def _with_parameters(self, training: bool) -> tuple[Callable[..., Any], Tensor]:
        """What calls a function of the network with the parameters as they are now; and one of these.

        training: whether with dropout.
        """
        config, values = self.config, self.by_name()
        p = Parameters(operations, values, config.norm, eps=config.eps, random=True if training else None)
        return lambda function, *tensors, **options: function(p, config, *tensors, **options), next(
            iter(values.values())
        )
