"""Our layer and torch.nn.RMSNorm against a copy, measured by a program that shares nothing with compare.py.

python benchmarks/independent.py [--threads N] [--rounds N] [SHAPE ...]

In a round the three run one after another, in every position equally often. It prints the medians over the rounds of
the ratios within a round. If compare.py prints the same ratio, it does not depend on how either program measures.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from statistics import median

import torch

from rmsnorm.torch_impl import RMSNorm

SHAPES = ("1x4096", "32x768", "512x768", "8192x1024", "4096x4096")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=12, help="rounded up to a multiple of 6, the orders of three")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads")
    print(f"{'':30}{'built-in / ours':>16}{'ours / copy':>14}{'ours, ms':>12}")
    for shape, dtype in itertools.product(options.shapes, (torch.float32, torch.bfloat16)):
        sizes = [int(size) for size in shape.split("x")]
        for backward in (False, True):
            times = rounds(candidates(sizes, dtype, backward), options.rounds)
            faster = median(b / a for a, b in zip(times["ours"], times["built-in"], strict=True))
            slower = median(a / b for a, b in zip(times["ours"], times["copy"], strict=True))
            what = f"{'fwd+bwd' if backward else 'fwd':8}{shape:11}{str(dtype).removeprefix('torch.')}"
            print(f"{what:30}{faster:16.2f}{slower:14.2f}{1e3 * median(times['ours']):12.4f}", flush=True)


def candidates(sizes: list[int], dtype: torch.dtype, backward: bool) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(sizes, generator=generator).to(dtype) for _ in range(2))
    gain = 1 + torch.randn(sizes[-1], generator=generator) / 8
    layers: dict[str, torch.nn.Module] = {}
    for name, kind in (("ours", RMSNorm), ("built-in", torch.nn.RMSNorm)):
        layers[name] = kind(sizes[-1], dtype=dtype)
        with torch.no_grad():
            layers[name].weight.copy_(gain)
    y = {name: layer(x).detach().double() for name, layer in layers.items()}
    limit = 8 * torch.finfo(dtype).eps  # sqrt(4096) / 8: roundings of the sum; those of the result are fewer
    torch.testing.assert_close(y["ours"], y["built-in"], rtol=limit, atol=0.0)

    def training(layer: torch.nn.Module) -> object:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(layer(leaf), (leaf, layer.weight), dy)

    def inference(layer: torch.nn.Module) -> object:
        with torch.no_grad():
            return layer(x)

    run = training if backward else inference
    return {
        **{name: lambda layer=layer: run(layer) for name, layer in layers.items()},
        "copy": (lambda: (x.clone(), x + dy)) if backward else x.clone,
    }


def rounds(calls: dict[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """The best of three turns of each candidate in every round. The rounds go through all orders."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(-(-count // 6)):
        for order in itertools.permutations(calls):
            for name in order:
                times[name].append(min(turn(calls[name]) for _ in range(3)))
    return times


def turn(call: Callable[[], object], at_least: float = 5e-4) -> float:
    call()
    number, began = 0, time.perf_counter()
    while number == 0 or time.perf_counter() - began < at_least:
        call()
        number += 1
    return (time.perf_counter() - began) / number


if __name__ == "__main__":
    main()
