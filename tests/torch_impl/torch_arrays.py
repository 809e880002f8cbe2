"""Arrays of NumPy as tensors of PyTorch, and back, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch


def to_torch(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.astype(np.float32)).bfloat16()  # exact
    return torch.from_numpy(value.copy())


def to_numpy(value: Any) -> Any:
    if value is None:
        return None
    value = value.detach()
    return value.float().numpy().astype(ml_dtypes.bfloat16) if value.dtype == torch.bfloat16 else value.numpy()


def torch_options(options: dict[str, Any]) -> dict[str, Any]:
    converted = {name: to_torch(value) for name, value in options.items()}
    if "out_dtype" in options:
        converted["out_dtype"] = getattr(torch, options["out_dtype"])
    return converted


def randn(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
