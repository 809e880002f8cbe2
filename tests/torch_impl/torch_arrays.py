"""Arrays of NumPy as tensors of PyTorch, and back, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
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


LAYOUTS: dict[str, Callable[[Any], Any]] = {  # of a tensor with four axes in memory
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "rows apart": lambda t: t.repeat(1, 1, 1, 2)[..., : t.shape[-1]],
    "columns apart": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "rows last": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "expanded": lambda t: t[:1].expand(t.shape),
}
