"""Nematus's Transformer as a PyTorch module: scores, losses and translations.

Logits and the output of the encoder are batch-major, as in Nematus.
"""

from __future__ import annotations

from typing import Any, ClassVar

from rmsnorm.nematus import protocol
from rmsnorm.nematus.models import transformer
from rmsnorm.nematus.torch.model import Model

__all__ = ["Transformer"]


class Transformer(Model, protocol.Transformer):
    """Nematus's Transformer: see rmsnorm.nematus.protocol.Transformer.

    A new model is in evaluation mode. Its state dict has Nematus's names with dots for slashes.

    Example:
        >>> import torch
        >>> from rmsnorm.nematus.config import Config
        >>> from rmsnorm.nematus.names import variables
        >>> sizes = {"embedding_size": 4, "state_size": 4, "source_vocab_sizes": (4,), "target_vocab_size": 3}
        >>> config = Config(**sizes, model_type="transformer", norm="rms", transformer_num_heads=2)
        >>> model = Transformer(config, {row.name: torch.zeros(row.shape) for row in variables(config)})
        >>> x, y = torch.tensor([[[3], [2], [0]]]), torch.tensor([[1], [0]])
        >>> model.loss(x, torch.ones(3, 1), y, torch.ones(2, 1)).detach()  # 2 log 3
        tensor([2.1972])
    """

    network: ClassVar[Any] = transformer
