"""RMSNorm in a PyTorch that lacks what private.py asks for: the program of test_private.

The names are the arguments. Each is away while rmsnorm is imported, as it would be in a version without it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch.autograd import forward_ad

MISSING = (
    "_C._are_functorch_transforms_active",
    "_C._is_tracing",
    "_C._len_torch_dispatch_stack",
    "_C._dynamo.guards._empty_strided_cpu",
    "_C._dynamo.eval_frame._FrameExecStrategy",
    "compiler.is_exporting",
    "_prims_common.suggest_memory_format",
    "Tensor._is_zerotensor",
    "autograd.forward_ad._current_level",
    "_subclasses",
)


@contextmanager
def without(names: list[str]) -> Iterator[None]:
    with ExitStack() as patches:
        for name in names:
            *path, last = name.split(".")
            owner = reduce(getattr, path, torch)
            if f"torch.{name}" in sys.modules:
                patches.callback(sys.modules.__setitem__, f"torch.{name}", sys.modules[f"torch.{name}"])
                sys.modules[f"torch.{name}"] = None  # type: ignore[assignment]
            patches.enter_context(patch.object(owner, last, None, create=True))  # this version may lack it
        yield


def results(torch_impl: Any) -> dict[str, Any]:
    """The bits of what a program may do with a layer, each as a list."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}

    def note(name: str, *tensors: Any) -> None:
        found[name] = [t.detach().double().flatten().tolist() for t in tensors]

    for dtype in (torch.float32, torch.bfloat16):
        x, dy, z = (torch.randn(3, 5, 8, generator=generator).to(dtype) for _ in range(3))
        layer = torch_impl.RMSNorm(8, dtype=dtype)
        leaf = x.clone().requires_grad_()
        weights = (leaf, layer.weight)
        for call in ("first", "second"):
            note(f"{call} call in {dtype}", layer(x), *torch.autograd.grad(layer(leaf), weights, dy))
        note(f"gaps in {dtype}", layer(x.mT.contiguous().mT))
        masked = lambda x: torch_impl.rms_norm(x, mask=z > 0, residual=z)[0]  # noqa: E731, B023
        note(f"mask and residual in {dtype}", masked(x), *torch.autograd.grad(masked(leaf), leaf, dy))
        if dtype == torch.bfloat16:  # in float32 the gate of an operation that is watched has other last bits
            gated = lambda x: torch_impl.rms_norm(x, gate=z)  # noqa: E731, B023
            note(f"gate in {dtype}", gated(x), *torch.autograd.grad(gated(leaf), leaf, dy))
        note(f"forward mode in {dtype}", *torch.func.jvp(layer, (x,), (dy,)))
        with forward_ad.dual_level():
            y = layer(forward_ad.make_dual(x, dy))
            note(f"dual numbers in {dtype}", *forward_ad.unpack_dual(y))
        note(f"vmap in {dtype}", torch.vmap(layer)(x))
        grads = torch.func.vmap(torch.func.grad(lambda x: layer(x).float().sum()))  # noqa: B023
        note(f"a gradient each in {dtype}", grads(x))
        second = torch.autograd.grad(layer(leaf), weights, dy, create_graph=True)
        note(f"second derivatives in {dtype}", *torch.autograd.grad([s.sum() for s in second], weights))
        for backend in ("aot_eager", "inductor") if dtype == torch.float32 else ("aot_eager",):
            program = torch.compile(layer, backend=backend, fullgraph=True)
            note(f"{backend} in {dtype}", program(x), *torch.autograd.grad(program(leaf), weights, dy))
        y = torch.utils.checkpoint.checkpoint(layer, leaf, use_reentrant=False)
        note(f"checkpoint in {dtype}", *torch.autograd.grad(y, weights, dy))
    return found


def main(names: list[str]) -> None:
    with without(names):
        from rmsnorm import torch_impl
    print(json.dumps(results(torch_impl)))


if __name__ == "__main__":
    main(sys.argv[1:])
