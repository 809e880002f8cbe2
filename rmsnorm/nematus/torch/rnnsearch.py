"""RNNSearch as Nematus computes it, as a PyTorch module: scores, losses and translations."""

from __future__ import annotations

from typing import Any, ClassVar

from rmsnorm.nematus import protocol
from rmsnorm.nematus.models import rnnsearch
from rmsnorm.nematus.torch.model import Model

__all__ = ["RNNSearch"]


class RNNSearch(Model, protocol.RNNSearch):
    """Nematus's attentional encoder-decoder: see rmsnorm.nematus.protocol.RNNSearch.

    A new model is in evaluation mode. Its state dict has Nematus's names with dots for slashes.

    Example:
        >>> import torch
        >>> from rmsnorm.nematus.config import Config
        >>> from rmsnorm.nematus.names import variables
        >>> config = Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3)
        >>> model = RNNSearch(config, {row.name: torch.zeros(row.shape) for row in variables(config)})
        >>> x, y = torch.tensor([[[3], [2], [0]]]), torch.tensor([[1], [0]])
        >>> model.loss(x, torch.ones(3, 1), y, torch.ones(2, 1)).detach()  # 2 log 3
        tensor([2.1972])
    """

    network: ClassVar[Any] = rnnsearch
