"""Training in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from experiments.norms import used
from experiments.torch_training import TorchTrainer
from experiments.translation import TranslationOptions
from rmsnorm.nematus.backends import model_class
from rmsnorm.nematus.config import Config


class Learner(TorchTrainer):
    """See experiments.translation.task.Learner."""

    def __init__(self, config: Config, parameters: Mapping[str, Any], options: TranslationOptions) -> None:
        model = model_class("torch", config)(config, parameters)
        super().__init__(model, torch.optim.Adam(model.parameters(), lr=options.rate), clip=options.clip)
        self.norms = used("torch", options.operations)
        self.batch: Any = None

    def loss(self, number: int) -> Tensor:
        with self.norms:
            mean: Tensor = self.model(*map(torch.from_numpy, self.batch)).mean()
        return mean

    def minimise(self, batch: Any) -> float:
        self.batch = batch
        return self.step(0)

    def seconds_of(self, batch: Any) -> dict[str, float]:
        self.batch = batch
        return self.seconds()
