"""The base class of RNNSearch and the Transformer: a module that computes what a network of models/ describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from rmsnorm.nematus.models.parameters import Parameters
from rmsnorm.nematus.models.shell import Shell
from rmsnorm.nematus.torch import operations
from rmsnorm.nematus.torch.parameters import Named

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


class Model(Shell, Named):
    """A module for batches (x, x_mask, y, y_mask), whose call is the loss of each sentence."""

    operations: ClassVar[Any] = operations

    def __init__(self, config: Config, parameters: Mapping[str, Any]) -> None:
        Named.__init__(self, parameters)
        self.config = config
        self.eval()

    def forward(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> Tensor:
        """The loss, for wrappers that train a module."""
        return self.loss(x, x_mask, y, y_mask)

    def is_training(self) -> bool:
        return self.training

    def runner(self, *, training: bool) -> tuple[Callable[..., Any], Tensor]:
        config, values = self.config, self.by_name()
        p = Parameters(operations, values, config.norm, eps=config.eps, random=True if training else None)
        return lambda function, *tensors, **options: function(p, config, *tensors, **options), next(
            iter(values.values())
        )

    search = torch.no_grad()(Shell.search)
