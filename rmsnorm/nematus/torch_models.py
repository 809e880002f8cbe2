"""RNNSearch, the Transformer and the recurrent cells in PyTorch: modules whose parameters have the names of Nematus."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial as bind
from typing import Any, ClassVar

import torch
from torch import Tensor

from rmsnorm.nematus import cells, protocol, torch_operations
from rmsnorm.nematus.config import Config, Norm
from rmsnorm.nematus.models.parameters import PARTIAL, Parameters
from rmsnorm.nematus.names import dotted, slashed
from rmsnorm.specification import errors

__all__ = ["RNNSearch", "Recurrent", "Transformer", "gru", "lstm"]


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


class Recurrent(Named):
    """A layer of one of the authors' cells: see rmsnorm.nematus.cells. kind is ``gru`` or ``lstm``.

    Example:
        >>> layer = Recurrent("lstm", 3, 4, norm="rms")
        >>> [states.shape for states in layer(torch.zeros(5, 2, 3), mask=torch.ones(5, 2))]
        [torch.Size([5, 2, 4]), torch.Size([5, 2, 4])]
    """

    def __init__(
        self,
        kind: cells.Kind,
        input_size: int,
        hidden_size: int,
        *,
        norm: Norm = "none",
        partial: float = PARTIAL,
        device: Any = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        if dtype is not None:
            dtype = getattr(torch, errors.dtype_named("Recurrent", "dtype", dtype))
        seed = int(torch.randint(2**31, ()).item())
        parameters = cells.new_parameters(kind, input_size, hidden_size, norm, seed)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        super().__init__({name: torch.as_tensor(v, device=device, dtype=dtype) for name, v in parameters.items()})
        self.kind, self.hidden_size = kind, hidden_size
        self.norms: dict[str, Any] = {"norm": norm, "partial": partial}

    def forward(self, x: Tensor, *states: Tensor, mask: Tensor | None = None) -> Any:
        """The states (length, batch, hidden_size), of an LSTM (h, c). Without first states these are zeros."""
        states = cells.first_states(self.kind, states, x.new_zeros(x.shape[1], self.hidden_size))
        cell: Any = lstm if self.kind == "lstm" else gru
        return cell(x, *states, self.by_name(), mask=mask, **self.norms)

    def extra_repr(self) -> str:
        return f"{self.kind}, norm={self.norms['norm']!r}, {super().extra_repr()}"
