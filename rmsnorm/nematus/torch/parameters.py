"""What the recurrent models and the Transformer are made of: parameters by name, the norm, and projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rmsnorm.nematus import cells
from rmsnorm.nematus.cells import EPS, PARTIAL, CellNorm, check_norm
from rmsnorm.torch_impl.functional import rms_norm


class Scope(torch.nn.Module):
    """Parameters below one name."""

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={tuple(value.shape)}" for name, value in self.named_parameters(recurse=False))


class Named(Scope):
    """A module with parameters by names with slashes, as ``gru0/state_to_gates``; in its state dict with dots."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__()
        for name, value in parameters.items():
            *scopes, leaf = name.split("/")
            module: torch.nn.Module = self
            for scope in scopes:
                if scope not in module._modules:
                    module.add_module(scope, Scope())
                module = module.get_submodule(scope)
            copy = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value)
            module.register_parameter(leaf, torch.nn.Parameter(copy))

    def by_name(self) -> dict[str, Tensor]:
        return {name.replace(".", "/"): value for name, value in self.named_parameters()}


class Dropout:
    """Nematus's dropout after Gal & Ghahramani: one mask for each name, the same at every step of a sequence."""

    def __init__(self, rates: Mapping[str, float]) -> None:
        self.rates = rates
        self.masks: dict[str, Tensor] = {}

    def __call__(self, name: str, x: Tensor, *, whole: bool = False) -> Tensor:
        """Drop features of x in all steps; ``whole``: all features in some steps."""
        if not self.rates[name]:
            return x
        if name not in self.masks:
            ones = torch.ones_like(x[..., :1]) if whole else x.new_ones(x.shape[-2:])
            self.masks[name] = functional.dropout(ones, self.rates[name])
        return x * self.masks[name]


class Parameters:
    """Tensors below a name.

    ``parameters / "gru0"`` is what lies below that name, ``parameters["W"]`` a tensor. The norm of the model is carried
    along, and in training its dropout: ``drop("W", x)`` is what is left of the input x of W.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        norm: CellNorm = "none",
        *,
        partial: float = PARTIAL,
        dropout: Dropout | None = None,
        scope: str = "",
    ) -> None:
        check_norm(norm)
        self.values, self.norm, self.partial, self.dropout, self.scope = values, norm, partial, dropout, scope

    def __truediv__(self, name: str) -> Parameters:
        return Parameters(
            self.values, self.norm, partial=self.partial, dropout=self.dropout, scope=f"{self.scope}{name}/"
        )

    def __getitem__(self, name: str) -> Tensor:
        return self.values[self.scope + name]

    def get(self, name: str) -> Tensor | None:
        return self.values.get(self.scope + name)

    def drop(self, name: str, x: Tensor, *, whole: bool = False) -> Tensor:
        return x if self.dropout is None else self.dropout(self.scope + name, x, whole=whole)


def normalize(p: Parameters, a: Tensor, gain: str, offset: str) -> Tensor:
    """The norm over the last axis: a / sqrt(mean(a^2) + eps) * gain + offset; of a - mean(a) for LayerNorm."""
    if p.norm == "none":
        return a
    if p.norm == "layer":
        return functional.layer_norm(a, a.shape[-1:], p[gain], p.get(offset), EPS)
    return rms_norm(a, p[gain], p.get(offset), variant="nematus", partial=p.partial if p.norm == "prms" else None)


def project(p: Parameters, x: Tensor, weight: str, bias: str | None, norm: tuple[str, str] | None) -> Tensor:
    """norm(x W + b), with b inside the norm; without a bias or a norm where these are None."""
    a = p.drop(weight, x) @ p[weight]
    if bias is not None:
        a = a + p[bias]
    return a if norm is None else normalize(p, a, *norm)


def feed_forward(p: Parameters, x: Tensor, *, norm: bool = True) -> Tensor:
    """norm(x W + b), the norm's variables directly below the name of the layer."""
    return project(p, x, "W", "b", leaves(p) if norm else None)


def leaves(p: Parameters, scope: str = "") -> tuple[str, str]:
    """What Nematus calls gain and offset of the norm below that scope."""
    return cells.leaves(p.norm, scope)
