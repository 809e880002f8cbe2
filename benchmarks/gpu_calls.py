"""Microseconds of the host that a call of a layer on a GPU takes: what Python and PyTorch do around the kernels.

    python benchmarks/gpu_calls.py                                                                # with a GPU
    RMSNORM_GPU_KERNELS=interpret TRITON_INTERPRET=1 python benchmarks/gpu_calls.py               # without one

Without a GPU the tensors are on the CPU, and a launch does nothing. Each call is timed alone; the queue of the GPU is
drained before it is full, as a launch then waits. Beside ours are a torch.autograd.Function that only allocates y,
the parts of a call, and the built-in layer.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any
from unittest.mock import MagicMock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rmsnorm.gpu import is_interpreted
from rmsnorm.torch_impl import RMSNorm, gpu, rms_norm

SHAPE, CALLS, DRAINED = (512, 4096), 1000, 50
DTYPES = torch.float32, torch.bfloat16


class Empty(torch.autograd.Function):
    """What every function of autograd takes: it keeps two tensors and allocates a result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, gain = ctx.saved_tensors
        return x, gain


def candidates(device: str, dtype: torch.dtype) -> Iterator[tuple[str, bool, Callable[[], Any]]]:
    """Name, whether autograd is on, and the call."""
    x, dy = torch.randn(2, *SHAPE, device=device, dtype=dtype)
    layer = RMSNorm(SHAPE[-1], device=device, dtype=dtype)
    frozen = copy.deepcopy(layer).requires_grad_(False)
    gain, leaf = layer.weight, x.clone().requires_grad_()

    def back(function: Callable[[Tensor], Tensor], *inputs: Tensor) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(function(leaf), inputs or (leaf, gain), dy)

    yield "layer without gradients", False, lambda: layer(x)
    yield "layer, forward with a graph", True, lambda: layer(leaf)
    yield "layer, forward and backward", True, back(layer)
    yield "layer, forward and backward, frozen gain", True, back(frozen, leaf)
    yield "function without gradients", False, lambda: rms_norm(x, gain)
    yield "function with a residual", False, lambda: rms_norm(x, gain, residual=dy)
    yield "function, forward and backward", True, back(lambda leaf: rms_norm(leaf, gain))
    yield "empty Function, forward", True, lambda: Empty.apply(leaf, gain)
    yield "empty Function, forward and backward", True, back(lambda leaf: Empty.apply(leaf, gain))
    yield "torch.empty_like", False, lambda: torch.empty_like(x)
    if device == "cpu":
        return
    built_in = torch.nn.RMSNorm(SHAPE[-1], device=device, dtype=dtype)
    ((_, kept), *_) = layer._kept
    yield "torch.nn.RMSNorm without gradients", False, lambda: built_in(x)
    yield "torch.nn.RMSNorm, forward with a graph", True, lambda: built_in(leaf)
    yield "torch.nn.RMSNorm, forward and backward", True, back(built_in, leaf, built_in.weight)
    tensors, sizes = (x, None, gain, None, None, None, torch.empty_like(x), None, None), gpu._in_rows(kept.launch, x)[1]
    yield "a launch", False, lambda: gpu._start(kept.launch, "forward", "forward", sizes, *tensors)
    yield "a device guard", False, lambda: guard(x)


def guard(x: Tensor) -> None:
    with torch.cuda.device_of(x):
        pass


@torch.enable_grad()
def microseconds(with_graph: bool, run: Callable[[], Any], drain: Callable[[], Any]) -> list[float]:
    torch.set_grad_enabled(with_graph)
    for _ in range(20):  # the first of which compile
        run()
    times = []
    for i in range(CALLS):
        if i % DRAINED == 0:
            drain()
        start = perf_counter_ns()
        run()
        times.append((perf_counter_ns() - start) / 1e3)
    drain()
    return times


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    if torch.cuda.is_available():
        device, drain, where = "cuda", torch.cuda.synchronize, torch.cuda.get_device_name()
    elif is_interpreted():
        from rmsnorm.gpu import triton_backward, triton_forward

        device, drain, where = "cpu", lambda: None, "launches that do nothing"
        gpu.starter = lambda *_: lambda *_: None  # type: ignore[assignment]
        triton_forward.forward = triton_backward.backward = triton_backward.add_up = MagicMock()
    else:
        raise SystemExit("gpu_calls: there is no GPU; set RMSNORM_GPU_KERNELS=interpret and TRITON_INTERPRET=1")
    table = Table("", *(f"{str(d)[6:]}, {kind}" for d in DTYPES for kind in ("least", "median")), box=None)
    table.title = f"Microseconds of the host, {SHAPE[0]}x{SHAPE[1]}, {where}, {torch.__version__}"
    columns = [{name: microseconds(*one, drain) for name, *one in candidates(device, d)} for d in DTYPES]
    for name in columns[0]:
        table.add_row(name, *(f"{f(times[name]):.1f}" for times in columns for f in (min, statistics.median)))
    Console().print(table)


if __name__ == "__main__":
    main()
