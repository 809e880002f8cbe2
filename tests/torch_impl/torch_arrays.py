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


def are_alike(got: Any, want: Any) -> bool:
    """Whether both may be the same numbers, by a kernel or by recipe.py, each within the bounds of the parity kit.

    Arithmetic of a few dozen roundings in float32 (float64), and a rounding to 16 bits may go to the other neighbour in
    each of three places, by 2 units: all of terms as large as the largest number.
    """
    exact = torch.float64 if got.dtype == torch.float64 else torch.float32
    bound = 6 * torch.finfo(got.dtype).eps / 2 + 64 * torch.finfo(exact).eps / 2
    got, want = got.detach().double(), want.detach().double()
    largest = want.abs().nan_to_num(0, 0, 0).max() if want.numel() else 0
    return bool((((got - want).abs() <= bound * largest) | (got == want) | (got.isnan() & want.isnan())).all())


LAYOUTS: dict[str, Callable[[Any], Any]] = {  # of a tensor with four axes in memory
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "rows apart": lambda t: t.repeat(1, 1, 1, 2)[..., : t.shape[-1]],
    "columns apart": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "rows last": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "expanded": lambda t: t[:1].expand(t.shape),
}
