"""Nematus's models and cells in PyTorch, for tests that hold for all frameworks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import ml_dtypes
import nematus_framework
import numpy as np
import torch
from torch.utils._pytree import tree_map

from rmsnorm.nematus import torch_models as nematus
from rmsnorm.nematus.backends import model_class

KEY = "torch"
quick = wide = nullcontext


class Model(nematus_framework.Model):
    def __init__(self, config: Any, parameters: Any, *, training: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.own = model_class("torch", config)(config, parameters).train(training)

    def gradients(self, *sentences: Any) -> tuple[Any, dict[str, Any]]:
        self.own.zero_grad(set_to_none=True)
        loss = self.own.loss(*sentences)
        loss.mean().backward()
        return numpy(loss), {name: numpy(value.grad) for name, value in self.own.by_name().items()}


def array(value: Any, dtype: str | None = None) -> Any:
    return torch.tensor(np.asarray(value), dtype=dtype and getattr(torch, dtype))


def numpy(value: Any) -> Any:
    value = value.detach()
    return value.float().numpy().astype(ml_dtypes.bfloat16) if value.dtype == torch.bfloat16 else value.numpy()


def overwrite(model: Any) -> None:
    """Writes other values into the memory of the parameters."""
    with torch.no_grad():
        for value in model.parameters():
            value.add_(1)


def pull_back(cell: str, inputs: Any, cotangents: Any, **options: Any) -> tuple[Any, Any]:
    leaves = tree_map(lambda value: array(value).requires_grad_(), inputs)
    outputs = getattr(nematus, cell)(
        *leaves, **tree_map(lambda x: array(x) if isinstance(x, np.ndarray) else x, options)
    )
    torch.autograd.backward(outputs if isinstance(outputs, tuple) else (outputs,), list(map(array, cotangents)))
    return tree_map(numpy, outputs), tree_map(lambda value: numpy(value.grad), leaves)


def new_cell(cell: str, size: int, state: int, **options: Any) -> Any:
    torch.manual_seed(0)
    return nematus.Recurrent(cell, size, state, **options)


def load(layer: Any, weights: dict[str, Any]) -> None:
    """By their names, where a slash is a dot."""
    state = {name.replace("/", "."): array(value) for name, value in weights.items()}
    layer.to(next(iter(state.values())).dtype).load_state_dict(state)
