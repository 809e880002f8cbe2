"""The operations of models/operations.py in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial as bind
from operator import getitem
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from rmsnorm.nematus.models.operations import looped
from rmsnorm.torch_impl import functional as own
from rmsnorm.torch_impl.private import is_transformed

cached: Final = None

tanh, sigmoid, relu = torch.tanh, torch.sigmoid, torch.relu
shape, rows, where, matmul = Tensor.size, getitem, torch.where, torch.matmul
concatenated, repeated, sum = torch.cat, torch.repeat_interleave, torch.sum
reshape, split = torch.reshape, bind(torch.chunk, dim=-1)
softmax, logsumexp = torch.softmax, torch.logsumexp
transposed, swapped = bind(torch.swapaxes, axis0=-1, axis1=-2), bind(torch.swapaxes, axis0=1, axis1=2)
rms_norm = bind(own.rms_norm, variant="nematus")
scan = bind(looped, torch.stack)  # iterates by unbind: the gradient of one step is as long as that step


def cast(x: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(x).to(like)


def filled(shape: Sequence[int], value: float, like: Tensor) -> Tensor:
    return like.new_full(shape, value)


def take(table: Tensor, ids: Tensor) -> Tensor:
    return functional.embedding(ids.clamp(min=0), table)


def log_softmax(x: Tensor) -> Tensor:
    return x.log_softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))


def picked(x: Tensor, ids: Tensor) -> Tensor:
    return x.gather(-1, ids[..., None])[..., 0]


def layer_norm(x: Tensor, gain: Tensor, offset: Tensor | None, eps: float) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], gain, offset, eps)


def dropout(x: Tensor, rate: float, random: Any) -> Tensor:
    return functional.dropout(x, rate)


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, rate: float, random: Any) -> Tensor:
    k = k - k.mean(-2, keepdim=True)  # softmax does not see it; in gradients it would have to cancel exactly
    return functional.scaled_dot_product_attention(q, k, v, bias, 0.0 if random is None else rate)


def positions(start: int, count: int, length: int, size: int, like: Tensor) -> Tensor:
    half = size // 2
    frequencies = torch.exp(-torch.arange(half, dtype=torch.float64) * (math.log(10000) / (half - 1)))
    angles = torch.arange(start, start + count)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos(), angles.new_zeros(count, size % 2)), 1).to(like)


def future(start: int, count: int, length: int, score: float, like: Tensor) -> Tensor:
    is_future = torch.ones((count, length), dtype=torch.bool, device=like.device).triu(start + 1)
    return torch.where(is_future, score, 0.0).to(like.dtype)


def to_host(x: Tensor) -> Any:
    return x.cpu().numpy()


def checked(check: Callable[..., Any], ids: Any, mask: Any) -> Any:
    return (ids, mask) if is_transformed() else check(on_host(ids), on_host(mask))


def on_host(value: Any) -> Any:
    """The value for NumPy, which has no bfloat16: floating-point tensors become float64."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    return value.double() if value.is_floating_point() else value


def as_ids(ids: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(ids, device=like.device).long()
