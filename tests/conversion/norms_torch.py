"""Norms of PyTorch that `replace` is asked about: made, called, differentiated and copied."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import torch
from torch import nn
from torch_arrays import to_numpy, to_torch
from torch_layers import LlamaRMSNorm

ROUNDING = 1e-5


class OwnNorm(nn.Module):
    """A norm with its own name and shape of the gain, along its own axis; without a gain where the shape is None."""

    def __init__(
        self, shape: Any = (8,), axis: int = -1, name: str = "g", buffer: bool = False, eps: float | None = 1e-5
    ) -> None:
        super().__init__()
        self.axis, self.name, self.bias, self.eps = axis, name, None, eps
        if buffer:
            self.register_buffer(name, torch.ones(shape), persistent=False)
        elif shape is not None:
            gain = torch.linspace(0.5, 2, 8) if 8 in shape[-1:] else torch.ones(())
            setattr(self, name, nn.Parameter(gain.expand(shape).clone()))

    def forward(self, hidden: Any) -> Any:
        y = hidden * torch.rsqrt(hidden.square().mean(self.axis, keepdim=True) + self.eps)
        return y * getattr(self, self.name, 1.0)


class Gated(OwnNorm):
    """Mamba-2's in groups, or with a sigmoid after the norm; the gate may be left out."""

    def __init__(self, group: int = 0) -> None:
        super().__init__()
        self.group = group

    def forward(self, hidden: Any, gate: Any = None) -> Any:
        f = 1.0 if gate is None else nn.functional.silu(gate) if self.group else gate.sigmoid()
        h = hidden * f if self.group else hidden
        wide = h.unflatten(-1, (-1, self.group or h.shape[-1]))
        y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).flatten(-2) * self.g
        return y if self.group else y * f


class GroupsAlone(Gated):
    def forward(self, hidden: Any) -> Any:
        return super().forward(hidden)


class WithExtra(OwnNorm):
    def forward(self, hidden: Any, extra: float = 1.0) -> Any:
        return super().forward(hidden) * extra


class Counting(OwnNorm):
    calls = 0

    def forward(self, hidden: Any) -> Any:
        self.calls += 1
        return super().forward(hidden)


class WithoutNaN(OwnNorm):
    def forward(self, hidden: Any) -> Any:
        return super().forward(hidden).nan_to_num()


class Training(OwnNorm):
    def forward(self, hidden: Any) -> Any:
        return super().forward(hidden) * (0.9 if self.training else 1.0)


class L2Norm(nn.Module):
    def forward(self, x: Any) -> Any:
        return nn.functional.normalize(x, dim=-1)


class TinyNorm(nn.Module):
    """Its eps is in an attribute with a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.tiny, self.rate = nn.Parameter(torch.ones(8)), 1e-6, 1.0

    def forward(self, x: Any) -> Any:
        return nn.functional.rms_norm(x, (8,), self.weight, self.tiny)


class WithoutEps(OwnNorm):
    def forward(self, x: Any) -> Any:
        return nn.functional.rms_norm(x, (8,), self.g, self.eps)


RIGHT = {
    "own": OwnNorm, "with an argument": WithExtra, "groups": lambda: GroupsAlone(4), "silu gate": lambda: Gated(4),
    "sigmoid gate": Gated,
}  # fmt: skip
LEFT = {
    "LayerNorm": lambda: nn.LayerNorm(8), "BatchNorm": lambda: nn.BatchNorm1d(8), "counting": Counting,
    "training": Training, "NaN": WithoutNaN, "L2": L2Norm,
}  # fmt: skip
EPS = {
    "own": (OwnNorm, "eps", "1e-05"), "Llama's": (lambda: LlamaRMSNorm(8), "variance_epsilon", "1e-06"),
    "tiny": (TinyNorm, "tiny", "1e-06"), "none": (lambda: WithoutEps(eps=None), "eps", "None"),
}  # fmt: skip


def call(layer: Any, *inputs: Any, **options: Any) -> Any:
    sent = {name: to_torch(value) for name, value in options.items()}
    return to_numpy(layer(*map(to_torch, inputs), **sent).detach())


def own_code(kind: Any, layer: Any, *inputs: Any, **options: Any) -> Any:
    return to_numpy(kind.forward(layer, *map(to_torch, inputs), **options).detach())


def results(layer: Any, *inputs: Any) -> list[Any]:
    """y, and the gradients for the inputs and the parameters."""
    leaves = [to_torch(array).requires_grad_() for array in inputs]
    y = layer(*leaves)
    gradients = torch.autograd.grad((y * y.detach().cos()).sum(), [*leaves, *layer.parameters()])
    return [np.asarray(to_numpy(tensor.detach())) for tensor in (y, *gradients)]


def copies(layer: Any) -> list[Any]:
    return [layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]


def double(layer: Any) -> None:
    """The gain is set to twice its value."""
    for name, parameter in [*layer.named_parameters()]:
        setattr(layer, name, nn.Parameter(2 * parameter.detach()))
