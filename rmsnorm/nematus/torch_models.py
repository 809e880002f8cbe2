"""RNNSearch, the Transformer and the authors' cells in PyTorch: modules whose parameters have the names of Nematus."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial as bind
from typing import Any, ClassVar

import torch
from torch import Tensor

from rmsnorm.nematus import cells, protocol, torch_operations
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.models.parameters import Parameters
from rmsnorm.nematus.names import dotted, slashed

__all__ = ["RNNSearch", "Transformer", "gru", "lstm"]


class Scope(torch.nn.Module):
    """Parameters below one name."""

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={tuple(value.shape)}" for name, value in self.named_parameters(recurse=False))


class Named(Scope):
    """A module whose parameters have names with slashes, as ``gru0/state_to_gates``; with dots in its state dict."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__()
        for name, value in parameters.items():
            *scopes, leaf = dotted(name).split(".")
            module: torch.nn.Module = self
            for scope in scopes:
                if scope not in module._modules:
                    module.add_module(scope, Scope())
                module = module.get_submodule(scope)
            copy = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value)
            module.register_parameter(leaf, torch.nn.Parameter(copy))

    def by_name(self) -> dict[str, Tensor]:
        return {slashed(name): value for name, value in self.named_parameters()}


class Model(protocol.Model, Named):
    """A module for batches (x, x_mask, y, y_mask), whose call is the loss of each sentence.

    A new model is in evaluation mode. Its state dict has Nematus's names with dots for slashes.
    """

    operations: ClassVar[Any] = torch_operations

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
        p = Parameters(torch_operations, values, config.norm, eps=config.eps, random=True if training else None)
        like = next(iter(values.values()))
        return lambda function, *tensors, **options: function(p, config, *tensors, **options), like

    translate = torch.no_grad()(protocol.Model.translate)


class RNNSearch(Model, protocol.RNNSearch):
    """Nematus's attentional encoder-decoder: see rmsnorm.nematus.protocol.RNNSearch."""


class Transformer(Model, protocol.Transformer):
    """Nematus's Transformer: see rmsnorm.nematus.protocol.Transformer."""


gru, lstm = bind(cells.gru, torch_operations), bind(cells.lstm, torch_operations)
