"""PyTorch, with its own layers or those of Keras: eagerly and in torch.compile."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch

from rmsnorm.specification.variants import PRESETS, Variant
from rmsnorm.targets.bridges import bridge
from rmsnorm.torch_impl import RMSNorm
from timing.backends import keras
from timing.candidates import (
    BUILTIN,
    COPY,
    COPY_INTO,
    LAYER_NORM,
    OURS,
    Call,
    Candidate,
    Workbench,
)  # fmt: skip
from timing.machine import processor
from timing.problem import Problem

Layers = Mapping[str, tuple[Any, Variant | None]]


@lru_cache
def _liger() -> Any:
    function = import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return lambda x, weight, eps: function.apply(x, weight, eps, 0.0, "llama", False)


@lru_cache
def _quack() -> Any:
    function = import_module("quack").rmsnorm
    return lambda x, weight, eps: function(x, weight, eps=eps)


# Packages with kernels for GPUs: what is installed, the function of x, weight and eps, and its variant.
_PEERS: Final = {
    "Liger": ("liger_kernel", _liger, PRESETS["llama"]),
    "quack": ("quack", _quack, PRESETS["standard"]),
}


class _Peer(torch.nn.RMSNorm):
    """The function of another package; what its import raises is the outcome of this candidate alone."""

    def __init__(self, width: int, load: Callable[[], Any], options: Mapping[str, Any]) -> None:
        super().__init__(width, eps=1e-6, **options)
        self.load = load

    def forward(self, x: torch.Tensor) -> Any:
        return self.load()(x, self.weight, self.eps)


def _peers(width: int, options: Mapping[str, Any]) -> Layers:
    """The layers of the packages that are installed."""
    return {
        kind: (_Peer(width, load, options), expected)
        for kind, (package, load, expected) in _PEERS.items()
        if find_spec(package)
    }


def load(device: str) -> Workbench:
    between = bridge("torch", device)

    def layers(problem: Problem, variant: Variant) -> Layers:
        options: Any = {"device": device, "dtype": getattr(torch, problem.dtype)}
        width = problem.x.shape[-1]
        made: Any = {
            OURS: (RMSNorm(width, **options, variant=variant, bias=False), variant),
            BUILTIN: (torch.nn.RMSNorm(width, **options), PRESETS["torch"]),
            LAYER_NORM: (torch.nn.LayerNorm(width, **options), None),
        }
        if device == "cuda":
            made |= _peers(width, options)
        for layer, _ in made.values():
            layer.load_state_dict({"weight": between.send(problem.scale)}, strict=False)
        return made

    return _workbench(device, torch.__version__, layers)


def load_keras(device: str) -> Workbench:
    os.environ["KERAS_TORCH_DEVICE"] = device
    version = keras.start("torch")
    return _workbench(device, f"{torch.__version__}, {version}", keras.layers)


def _workbench(device: str, version: str, layers: Callable[[Problem, Variant], Layers]) -> Workbench:
    between = bridge("torch", device)

    def candidates(problem: Problem, op: str, variant: Variant) -> list[Candidate]:
        torch.compiler.reset()
        x, dy = (between.send(array) for array in (problem.x, problem.dy))
        leaf = x.detach().requires_grad_()

        def pair(kind: str, layer: Any, expected: Variant | None) -> list[Candidate]:
            parameters = tuple(layer.parameters())

            def candidate(mode: str, run: Any) -> Candidate:
                def forward() -> Any:
                    with torch.no_grad():
                        return (run(x),)

                def both() -> Any:
                    y = run(leaf)
                    return (y, *torch.autograd.grad(y, (leaf, *parameters), dy))

                call = forward if op == "fwd" else both
                return Candidate(kind, call, mode, expected)

            return [candidate("", layer), candidate("compiled", torch.compile(layer, dynamic=False))]

        into = [torch.empty_like(x), torch.empty_like(x)]
        copies: dict[str, Call] = {
            COPY: lambda: x.clone() if op == "fwd" else (x.clone(), x + dy),
            COPY_INTO: lambda: into[0].copy_(x) if op == "fwd" else (into[0].copy_(x), torch.add(x, dy, out=into[1])),
        }
        made = layers(problem, variant).items()
        return [
            *(candidate for kind, (layer, expected) in made for candidate in pair(kind, layer, expected)),
            *(Candidate(kind, call) for kind, call in copies.items()),
        ]

    name = torch.cuda.get_device_name() if device == "cuda" else processor()
    synchronise = torch.cuda.synchronize if device == "cuda" else lambda: None
    return Workbench(version, name, candidates, between.fetch, synchronise)
