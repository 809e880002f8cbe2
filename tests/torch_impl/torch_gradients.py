"""Two ways to the gradients of rms_norm in PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from rmsnorm.torch_impl import rms_norm, rms_norm_vjp


def by_vjp(dy: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    return rms_norm_vjp(dy, *arrays, **options)


def by_autograd(dy: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
    leaves = [array.clone().requires_grad_() for array in arrays]
    y = rms_norm(*leaves, **options)
    y = y[0] if isinstance(y, tuple) else y
    return torch.autograd.grad(y, leaves, dy.to(y.dtype))
