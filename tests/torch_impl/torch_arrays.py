"""Arrays of NumPy as tensors of PyTorch, and back, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rmsnorm.targets.bridges import Torch

BRIDGE = Torch()


def to_torch(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return BRIDGE.send(value)


def to_numpy(value: Any) -> Any:
    return None if value is None else BRIDGE.fetch(value)


def randn(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
