"""Gated norms of transformers: the class's own code, and what replace makes of it, in turns in one process.

    python benchmarks/gate.py

The last three columns are of torch.compile. The least of each in milliseconds, on the CPU.
"""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import torch
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from rmsnorm.conversion import replace

SHAPES = ((512, 768), (4096, 4096))
SECONDS = 2.0  # of a cell
NORMS = {
    "Qwen3NextRMSNormGated": Qwen3NextRMSNormGated,
    "MambaRMSNormGated, 8 groups": lambda width: MambaRMSNormGated(width, width // 8),
}


def main() -> None:
    print(f"{torch.get_num_threads()} threads, PyTorch {torch.__version__}")
    print("| norm | x | | the class | ours | class / ours | the class | ours | class / ours |")
    print("|---|---|---|---|---|---|---|---|---|")
    order = random.Random(0)
    for name, build in NORMS.items():
        for shape in SHAPES:
            for dtype in (torch.float32, torch.bfloat16):
                for trains in (False, True):
                    times = _cell(build, shape, dtype, trains, order)
                    least = [min(own) for own in times.values()]
                    eager, compiled = (" | ".join(f"{ms:.2f}" for ms in part) for part in (least[:2], least[2:]))
                    title = f"{shape[0]}x{shape[1]} {str(dtype).removeprefix('torch.')}"
                    what = "with gradients" if trains else "forward"
                    print(
                        f"| {name} | {title} | {what} | {eager} | {least[0] / least[1]:.1f} "
                        f"| {compiled} | {least[2] / least[3]:.1f} |",
                        flush=True,
                    )


def _cell(build: Any, shape: tuple[int, int], dtype: torch.dtype, trains: bool, order: random.Random) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.compiler.reset()
    own = build(shape[1])
    torch.nn.init.normal_(own.weight, 1.0, 0.2)
    ours = torch.nn.Sequential(copy.deepcopy(own))
    replace(ours)
    own, ours = own.to(dtype), ours[0].to(dtype)
    x, gate, dy = torch.randn(3, *shape).to(dtype)

    def call(module: Any) -> None:
        if not trains:
            with torch.no_grad():
                module(x, gate)
            return
        leaves = [x.detach().requires_grad_(), gate.detach().requires_grad_(), module.weight]
        torch.autograd.grad(module(*leaves[:2]), leaves, dy)

    compiled_class, compiled = torch.compile(own), torch.compile(ours)
    calls = {
        "class": lambda: call(own), "ours": lambda: call(ours),
        "class, compiled": lambda: call(compiled_class), "compiled": lambda: call(compiled),
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + SECONDS
    for name in calls:
        calls[name]()
    while time.perf_counter() < end or len(times["class"]) < 5:
        for name in order.sample(list(calls), len(calls)):
            start = time.perf_counter()
            calls[name]()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


if __name__ == "__main__":
    main()
