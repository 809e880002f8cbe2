"""Milliseconds that the kernels take on a GPU, without the time that Python takes to start them.

    python benchmarks/gpu_graphs.py                # needs a GPU; two minutes, most of which is compilation

A CUDA graph holds twelve calls, and is replayed. Beside ours are a copy, the kernels of torch.nn.functional.rms_norm
and, where they are installed, of Liger and of cuDNN's frontend. Backward includes the sums for the gain, and its dy is
never its x. Inputs that would stay in the card's cache are six, in turn. A second table has other variants.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import rms_norm

from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import derive
from rmsnorm.torch_impl import kernels

SHAPES = (
    (16384, 8192, "bfloat16"), (16384, 8192, "float32"), (8192, 8192, "bfloat16"), (8192, 16384, "bfloat16"),
    (4096, 4096, "bfloat16"), (4096, 4096, "float32"), (8192, 1024, "bfloat16"), (32768, 768, "bfloat16"),
    (65536, 256, "bfloat16"), (131072, 128, "bfloat16"),
)  # fmt: skip
OTHERS = ("llama", "gemma", "paper", "with a residual")
NAMES = ("copy", "ours", "built-in", "Liger", "cuDNN")
CALLS, REPLAYS, EPS = 12, 6, 1e-6


def ours(variant: str, x: Tensor, gain: Tensor, residual: Tensor | None) -> tuple[Any, Callable[[Tensor], Any]]:
    """The call as the kernels compute it, and the forward pass with 1 / rho."""
    dtype = str(x.dtype).removeprefix("torch.")
    chosen = derive("rms_norm", variant, EPS, None)
    call = resolve("rms_norm", Spec(tuple(x.shape), dtype), Spec(tuple(gain.shape), dtype), None, variant=chosen)
    kept = kernels.kept_on(x.device, call, dtype)
    return kept, lambda x: kept.forward(True, x, residual, gain, None)


def candidates(x: Tensor, gain: Tensor) -> Iterator[tuple[str, str, Callable[[Tensor], Any]]]:
    """Name, pass, and a function of x, or of dy where it is the backward pass."""
    out, n = torch.empty_like(x), x.shape[1]
    yield "copy", "forward", out.copy_
    kept, forward = ours("torch", x, gain, None)
    inverse_rms = forward(x)[2]
    yield "ours", "forward", forward
    yield "ours", "backward", lambda dy: kept.backward((True, True, True), dy, None, x, gain, None, inverse_rms)
    for variant in OTHERS:
        is_sum = variant == "with a residual"
        yield variant, "forward", ours("torch" if is_sum else variant, x, gain, x if is_sum else None)[1]
    yield "built-in", "forward", lambda x: rms_norm(x, (n,), gain, EPS)
    _, rstd = torch.ops.aten._fused_rms_norm(x, (n,), gain, EPS)
    back = torch.ops.aten._fused_rms_norm_backward
    yield "built-in", "backward", lambda dy: back(dy, x, (n,), rstd, gain, [True, True])
    yield from _of_liger(x, gain)
    yield from _of_cudnn(x, gain)


def _of_liger(x: Tensor, gain: Tensor) -> Iterator[tuple[str, str, Callable[[Tensor], Any]]]:
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


def _of_cudnn(x: Tensor, gain: Tensor) -> Iterator[tuple[str, str, Callable[[Tensor], Any]]]:
    try:
        import cudnn.ops.norm.rmsnorm  # noqa: F401  (it registers the operators)

        n, scale = x.shape[1], gain.view(1, -1, 1, 1)
        _, inverse_rms = torch.ops.cudnn.rmsnorm(x.view(-1, n, 1, 1), scale, EPS)
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        print(f"cuDNN is left out: {str(error)[:100]}")
        return
    yield "cuDNN", "forward", lambda x: torch.ops.cudnn.rmsnorm(x.view(-1, n, 1, 1), scale, EPS)
    own = x.view(-1, n, 1, 1)
    yield (
        "cuDNN", "backward",
        lambda dy: torch.ops.cudnn.rmsnorm_bwd(dy.view(-1, n, 1, 1), own, scale, inverse_rms),
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="a file for all times, in milliseconds")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_graphs: there is no GPU")
    torch.manual_seed(0)
    title = f"ms, {torch.cuda.get_device_name()}, PyTorch {torch.__version__}"
    table, others = Table("", "", "dtype", *NAMES, box=None, title=title), Table("", "dtype", *OTHERS, box=None)
    measured = []
    for rows, n, dtype in SHAPES:
        x, *inputs = (
            torch.randn(rows, n, device="cuda").to(getattr(torch, dtype)) for _ in range(7 if rows * n <= 2**26 else 2)
        )
        gain = torch.rand(n, device="cuda").to(x.dtype) + 0.5
        times = {(name, kind): milliseconds(run, inputs) for name, kind, run in candidates(x, gain)}
        shape = {"rows": rows, "n": n, "dtype": dtype}
        measured += [{**shape, "name": name, "pass": kind, "ms": time} for (name, kind), time in times.items()]
        for kind in ("forward", "backward"):
            cells = (f"{times[name, kind]:.4f}" if (name, kind) in times else "-" for name in NAMES)
            table.add_row(kind, f"{rows}x{n}", dtype, *cells)
        others.add_row(f"{rows}x{n}", dtype, *(f"{times[name, 'forward']:.4f}" for name in OTHERS))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({"title": title, "times": measured}, indent=1), encoding="utf-8")
    Console().print(table)
    Console().print(others)


if __name__ == "__main__":
    main()
