"""Milliseconds that the kernels take on a GPU, without the time that Python takes to start them.

    python benchmarks/gpu_graphs.py                # needs a GPU; a minute, most of which is compilation

A CUDA graph holds twelve calls, and is replayed. Beside ours are a copy, the kernels of torch.nn.functional.rms_norm
and, if it is installed, of Liger. Backward includes the sums for the gain. Inputs that would stay in the card's cache
are six, in turn.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import rms_norm

from rmsnorm.parity import screen
from rmsnorm.specification.call import Spec, resolve
from rmsnorm.specification.variants import derive
from rmsnorm.torch_impl import gpu

SHAPES = (
    (16384, 8192, "bfloat16"), (16384, 8192, "float32"), (8192, 16384, "bfloat16"), (4096, 4096, "bfloat16"),
    (8192, 1024, "bfloat16"), (32768, 768, "bfloat16"), (131072, 128, "bfloat16"),
)  # fmt: skip
CALLS, REPLAYS, EPS = 12, 6, 1e-6


def candidates(rows: int, n: int, dtype: str) -> Iterator[tuple[str, str, Callable[[Tensor], Any]]]:
    """Name, pass, and a function of x, or of dy where it is the backward pass."""
    x = torch.randn(rows, n, device="cuda").to(getattr(torch, dtype))
    out, gain = torch.empty_like(x), torch.rand(n, device="cuda").to(x.dtype) + 0.5
    yield "copy", "forward", out.copy_
    variant = derive("rms_norm", "torch", EPS, None)
    plan = gpu.plan(resolve("rms_norm", Spec((rows, n), dtype), Spec((n,), dtype), None, variant=variant), dtype, None)
    if plan is not None:
        _, _, inverse_rms = gpu.forward(plan, x, None, gain, None, None)
        yield "ours", "forward", lambda x: gpu.forward(plan, x, None, gain, None, None)
        yield "ours", "backward", lambda dy: gpu.backward(plan, dy, x, gain, None, None, inverse_rms, None)
    yield "built-in", "forward", lambda x: rms_norm(x, (n,), gain, EPS)
    _, rstd = torch.ops.aten._fused_rms_norm(x, (n,), gain, EPS)
    back = torch.ops.aten._fused_rms_norm_backward
    yield "built-in", "backward", lambda dy: back(dy, x, (n,), rstd, gain, [True, True])
    try:
        from liger_kernel.ops import rms_norm as liger
    except ImportError:
        return
    _, own, factors, block, warps, mode = liger.rms_norm_forward(x, gain, EPS, 0.0, "llama", None)
    yield "Liger", "forward", lambda x: liger.rms_norm_forward(x, gain, EPS, 0.0, "llama", None)
    yield (
        "Liger", "backward",
        lambda dy: liger.rms_norm_backward(dy, own, gain, factors, 0.0, mode, block, warps, False, None),
    )  # fmt: skip


def milliseconds(run: Callable[[Tensor], Any], inputs: list[Tensor]) -> float:
    """The median of a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(inputs[0])  # which compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            run(inputs[i % len(inputs)])
    times = []
    for _ in range(REPLAYS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    return statistics.median(times[1:])


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_graphs: there is no GPU")
    torch.manual_seed(0)
    names = ("copy", "ours", "built-in", "Liger")
    table = Table("", "", "dtype", *names, box=None, title=f"ms, {torch.cuda.get_device_name()}, {torch.__version__}")
    for rows, n, dtype in SHAPES:
        many = 6 if rows * n <= 2**26 else 1
        inputs = [torch.randn(rows, n, device="cuda").to(getattr(torch, dtype)) for _ in range(many)]
        times = {(name, kind): milliseconds(run, inputs) for name, kind, run in candidates(rows, n, dtype)}
        for kind in ("forward", "backward"):
            cells = (f"{times[name, kind]:.4f}" if (name, kind) in times else "-" for name in names)
            table.add_row(kind, f"{rows}x{n}", dtype, *cells)
    screen.console().print(table)


if __name__ == "__main__":
    main()
