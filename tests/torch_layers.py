"""Norms of PyTorch to compare ours with, and how far the built-in one may be from ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch_arrays import randn


class LlamaRMSNorm(nn.Module):
    """As in transformers, models/llama/modeling_llama.py."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Any) -> Any:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


def randomised(layer: Any, seed: int = 1) -> Any:
    for i, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(randn(*parameter.shape, seed=seed + i))
    return layer


def ulp_bound(n: int, dtype: Any) -> float:
    """Relative error of the built-in: n roundings in the sum, halved by the root, and five more, in at least f32."""
    u = torch.finfo(dtype).eps / 2
    return (n / 2 + 6) * (u if dtype == torch.float64 else 2.0**-24) + 2 * u
