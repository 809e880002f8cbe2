"""The parts of the recurrent models and the Transformer: parameters by name, the norm, and projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rmsnorm.nematus import cells
from rmsnorm.nematus.cells import EPS, PARTIAL, CellNorm, check_norm, dotted, slashed
from rmsnorm.torch_impl.functional import rms_norm


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


class Dropout:
    """Nematus's dropout after Gal & Ghahramani: one mask for each name, the same in all steps of a sequence."""

    def __init__(self, rates: Mapping[str, float]) -> None:
        self.rates = rates
        self.masks: dict[str, Tensor] = {}

    def __call__(self, name: str, x: Tensor, *, whole: bool = False) -> Tensor:
        """Drop some features of x in all steps; with ``whole``, all features in some steps."""
        if not self.rates[name]:
            return x
        if name not in self.masks:
            ones = torch.ones_like(x[..., :1]) if whole else x.new_ones(x.shape[-2:])
            self.masks[name] = functional.dropout(ones, self.rates[name])
        return x * self.masks[name]


class Parameters:
    """Tensors below a name.

    ``parameters / "gru0"`` are the tensors below that name, ``parameters["W"]`` is a tensor. The object also has the
    norm of the model and, in training, its dropout: ``drop("W", x)`` applies the mask of W to x, the input of W.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        norm: CellNorm = "none",
        *,
        partial: float = PARTIAL,
        eps: float = EPS,
        dropout: Dropout | None = None,
        scope: str = "",
    ) -> None:
        check_norm(norm)
        self.values, self.norm, self.partial, self.eps = values, norm, partial, eps
        self.dropout, self.scope = dropout, scope

    def __truediv__(self, name: str) -> Parameters:
        return Parameters(
            self.values, self.norm, partial=self.partial, eps=self.eps, dropout=self.dropout,
            scope=f"{self.scope}{name}/",
        )  # fmt: skip

    def __getitem__(self, name: str) -> Tensor:
        return self.values[self.scope + name]

    def get(self, name: str) -> Tensor | None:
        return self.values.get(self.scope + name)

    def drop(self, name: str, x: Tensor, *, whole: bool = False) -> Tensor:
        return x if self.dropout is None else self.dropout(self.scope + name, x, whole=whole)


def normalise(p: Parameters, x: Tensor, gain: str, offset: str | None, norm: CellNorm | None = None) -> Tensor:
    """The norm over the last axis: x / sqrt(mean(x^2) + eps) * gain + offset; LayerNorm takes x - mean(x) as x.

    norm: by default that of the model.
    """
    norm = norm or p.norm
    if norm == "none":
        return x
    bias = None if offset is None else p.get(offset)
    if norm == "layer":
        return functional.layer_norm(x, x.shape[-1:], p[gain], bias, p.eps)
    partial = p.partial if norm == "prms" else None
    return rms_norm(x, p[gain], bias, variant="nematus", eps=p.eps, partial=partial)


def project(p: Parameters, x: Tensor, weight: str, bias: str | None, norm: tuple[str, str] | None) -> Tensor:
    """norm(x W + b), with b inside the norm; a bias or a norm of None is left out."""
    y = p.drop(weight, x) @ p[weight]
    if bias is not None:
        y = y + p[bias]
    return y if norm is None else normalise(p, y, *norm)


def feed_forward(p: Parameters, x: Tensor, *, norm: bool = True) -> Tensor:
    """norm(x W + b); the variables of the norm are directly below the name of the layer."""
    return project(p, x, "W", "b", leaves(p) if norm else None)


def leaves(p: Parameters, scope: str = "") -> tuple[str, str]:
    """Nematus's names of the gain and the offset of the norm below a scope."""
    return cells.leaves(p.norm, scope)
