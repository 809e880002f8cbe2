"""A module with parameters by names with slashes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rmsnorm.nematus.cells import dotted, slashed


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
