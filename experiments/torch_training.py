"""What experiments in PyTorch share: the norms as layers, a step, and the states of model and optimizer as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.parametrizations import weight_norm

from experiments.batches import generator
from experiments.experiment import State
from rmsnorm.nematus.cells import PARTIAL
from rmsnorm.torch_impl import RMSNorm


def norm_layer(norm: str, size: int) -> torch.nn.Module:
    """The norm of a layer's sums, over the last axis. Weight normalisation is of the layer's weights: see weighted."""
    if norm == "batch":
        return torch.nn.BatchNorm1d(size)
    if norm == "layer":
        return torch.nn.LayerNorm(size)
    if norm in ("rms", "prms"):
        return RMSNorm(size, bias=True, partial=PARTIAL if norm == "prms" else None, variant="zhang_tf")
    return torch.nn.Identity()


def weighted(norm: str, layer: torch.nn.Module) -> torch.nn.Module:
    """The layer with weight normalisation where that is the norm."""
    return weight_norm(layer) if norm == "weight" else layer


def seeded(seed: int, *numbers: int) -> None:
    """The same for what PyTorch draws."""
    torch.manual_seed(int(generator(seed, *numbers).integers(2**62)))


class TorchTrainer:
    """A model in training: see experiments.experiment.Trainer. Experiments add ``loss`` and ``evaluate``.

    clip: the largest norm of the gradient.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0, *, clip: float | None = None
    ) -> None:
        self.model, self.optimizer, self.seed, self.clip = model, optimizer, seed, clip
        self.parameters = sum(parameter.numel() for parameter in model.parameters())

    def loss(self, number: int) -> Tensor:
        """The loss on the batch of this number."""
        raise NotImplementedError

    def step(self, number: int) -> float:
        return self.descend(self.loss(number))

    def descend(self, loss: Tensor) -> float:
        """One step of the optimizer."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.item()

    def state(self) -> State:
        arrays = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        for index, slots in self.optimizer.state_dict()["state"].items():
            arrays |= {f"optimizer/{index}/{name}": torch.as_tensor(value) for name, value in slots.items()}
        return {name: value.detach().cpu().numpy().copy() for name, value in arrays.items()}

    def restore(self, state: State) -> None:
        model = {name.removeprefix("model/"): _tensor(a) for name, a in state.items() if name.startswith("model/")}
        self.model.load_state_dict(model)
        slots: dict[int, dict[str, Any]] = {}
        for name, array in state.items():
            if name.startswith("optimizer/"):
                _, index, slot = name.split("/")
                slots.setdefault(int(index), {})[slot] = _tensor(array)
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": slots})


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array))
