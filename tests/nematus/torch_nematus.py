"""Nematus's models and cells in PyTorch, for tests that hold for all frameworks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import ml_dtypes
import nematus_framework
import numpy as np
import torch

from rmsnorm.nematus import torch_models as nematus
from rmsnorm.nematus.backends import model_class

KEY = "torch"
quick = wide = nullcontext


def array(value: Any, dtype: str | None = None) -> Any:
    return torch.tensor(np.asarray(value), dtype=dtype and getattr(torch, dtype))


def numpy(value: Any) -> Any:
    value = value.detach()
    return value.float().numpy().astype(ml_dtypes.bfloat16) if value.dtype == torch.bfloat16 else value.numpy()


class Model(nematus_framework.Model):
    numpy = staticmethod(numpy)

    def __init__(self, config: Any, parameters: Any, *, training: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.own = model_class("torch", config)(config, parameters).train(training)

    def gradients(self, *sentences: Any) -> dict[str, Any]:
        weights = self.own.by_name()
        gradients = torch.autograd.grad(self.own.loss(*sentences).mean(), list(weights.values()))
        return dict(zip(weights, map(numpy, gradients), strict=True))


def new_cell(cell: str, size: int, state: int, **options: Any) -> Any:
    torch.manual_seed(0)
    return nematus.Recurrent(cell, size, state, **options)


def load(layer: Any, weights: dict[str, Any]) -> None:
    layer.load_state_dict({name.replace("/", "."): array(value) for name, value in weights.items()})
