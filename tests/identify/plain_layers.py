"""A layer that the tests of identify change."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")


class Plain(torch.nn.Module):
    """RMSNorm with a gain; the tests replace ``norm``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.norm(x.float()).type_as(x)

    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight.float()
