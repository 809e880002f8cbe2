"""Batches of sentences as tensors on the device of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rmsnorm.nematus import sentences
from rmsnorm.nematus.dialects import rules
from rmsnorm.torch_impl.rounding import is_transformed

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


def source(op: str, x: Any, x_mask: Any, config: Config, like: Tensor) -> tuple[Tensor, Tensor]:
    """Ids (factors, length, batch), checked against the sizes of the vocabularies, and their mask (length, batch)."""
    if not is_transformed():  # in a graph there are no values to check
        x, x_mask = sentences.source(op, on_host(x), on_host(x_mask), config)
    return torch.as_tensor(x, device=like.device).long(), torch.as_tensor(x_mask).to(like)


def target(op: str, y: Any, batch: int, config: Config, like: Tensor, y_mask: Any = None) -> tuple[Tensor, Tensor]:
    """Ids (length, batch), checked against the size of the vocabulary, and their mask."""
    if not is_transformed():
        y, y_mask = sentences.target(op, on_host(y), batch, config, on_host(y_mask))
    words = torch.as_tensor(y, device=like.device).long()
    if y_mask is None:
        y_mask = words != 0 if rules(config).pads_with_zero else torch.ones_like(words)
    return words, torch.as_tensor(y_mask).to(like)


def on_host(value: Any) -> Any:
    """The value for NumPy, which has no bfloat16: floating-point tensors become float64."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    return value.double() if value.is_floating_point() else value
