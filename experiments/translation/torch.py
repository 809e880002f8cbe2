"""Training in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from experiments.torch_training import TorchTrainer
from rmsnorm.nematus.backends import model_class
from rmsnorm.nematus.config import Config


class Learner(TorchTrainer):
    """See experiments.translation.task.Learner."""

    def __init__(self, config: Config, parameters: Mapping[str, Any], rate: float, clip: float) -> None:
        model = model_class("torch", config)(config, parameters)
        super().__init__(model, torch.optim.Adam(model.parameters(), lr=rate), clip=clip)

    def minimise(self, batch: Any) -> float:
        return self.descend(self.model(*map(torch.from_numpy, batch)).mean())
