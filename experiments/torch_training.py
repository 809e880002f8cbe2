"""What experiments in PyTorch share: the norms as layers, a step, and the states of model and optimizer as arrays."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.parametrizations import weight_norm

from experiments.batches import generator
from experiments.experiment import State, partial_of
from experiments.norms import norms
from rmsnorm.torch_impl import RMSNorm

_EPS = 1e-5


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm over the last axis, with gain and offset, as ``--operations`` says."""

    def __init__(self, norm: str, size: int, operations: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.bias = torch.nn.Parameter(torch.zeros(size))
        self.is_centred, self.partial, self.norms = norm == "layer", partial_of(norm), norms("torch", operations)

    def forward(self, x: Tensor) -> Tensor:
        own = x, self.weight, self.bias, _EPS
        return self.norms.layer_norm(*own) if self.is_centred else self.norms.rms_norm(*own, self.partial)


def norm_layer(norm: str, size: int, operations: str) -> torch.nn.Module:
    """The norm of a layer's sums, over the last axis. Weight normalisation is of the layer's weights: see weighted."""
    if norm == "batch":
        return torch.nn.BatchNorm1d(size)
    if norm.startswith("prms") or norm == "rms":
        if operations == "ours":
            return RMSNorm(size, eps=_EPS, bias=True, partial=partial_of(norm), variant="nematus")
        return Norm(norm, size, operations)
    return Norm(norm, size, operations) if norm == "layer" else torch.nn.Identity()


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

    def seconds(self) -> dict[str, float]:
        """See experiments.experiment.Trainer."""
        began = time.perf_counter()
        loss = self.loss(0)
        forward = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        backward = time.perf_counter()
        self.update()
        loss.item()
        return {"forward": forward - began, "backward": backward - forward, "step": time.perf_counter() - began}

    def descend(self, loss: Tensor) -> float:
        """One step of the optimizer."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.update()
        return loss.item()

    def update(self) -> None:
        """Change the parameters by their gradients."""
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()

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
