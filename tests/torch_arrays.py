"""Arrays of NumPy as tensors of PyTorch and back, bit for bit; layouts; and how near two results may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import calls
import numpy as np
import torch

from rmsnorm.accuracy.bounds import bound
from rmsnorm.specification import dtypes
from rmsnorm.targets.bridges import Torch

BRIDGE = Torch()


def to_torch(value: Any) -> Any:
    return BRIDGE.send(value) if isinstance(value, np.ndarray) else value


def to_numpy(value: Any) -> Any:
    return BRIDGE.fetch(value) if isinstance(value, torch.Tensor) else value


def randn(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def are_alike(got: Any, want: Any) -> bool:
    """Whether both may be the same numbers, by a kernel or by recipe.py, each within the kit's bound of dx.

    That is the widest of one row. All terms are as large as the largest number, as numbers of one size have.
    """
    names = {torch.float64: "float64", torch.float16: "float16", torch.bfloat16: "bfloat16"}
    dtype, n = names.get(got.dtype, "float32"), want.shape[-1] if want.ndim else 1
    one_row = calls.arguments(np.zeros((1, n), dtype)).call
    limit = 2 * bound("dx", one_row, dtype, residual=True) * dtypes.unit_roundoff(dtype)
    got, want = got.detach().double(), want.detach().double()
    largest = want.abs().nan_to_num(0, 0, 0).max() if want.numel() else 0
    return bool((((got - want).abs() <= limit * largest) | (got == want) | (got.isnan() & want.isnan())).all())


def hold(results: dict[str, Any], *arrays: Any, **options: Any) -> None:
    """Results of a call, such as y and dx, are within the bounds of the parity kit of the golden's."""
    found = {name: to_numpy(result.detach()) for name, result in results.items()}
    calls.hold(found, *map(to_numpy, arrays), **{name: to_numpy(value) for name, value in options.items()})


LAYOUTS: dict[str, Callable[[Any], Any]] = {  # of a tensor with four axes in memory
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "rows apart": lambda t: t.repeat(1, 1, 1, 2)[..., : t.shape[-1]],
    "columns apart": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "rows last": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "expanded": lambda t: t[:1].expand(t.shape),
}
