"""Where a partial statistic pays: the forward pass with p of the elements in the statistic, beside all of them.

    python benchmarks/partial.py [kernels] [torch] [tf] [flax]

The three take turns. ``kernels`` are those of rmsnorm.cpu, into memory that is there already, so that page faults do
not hide what is saved; ``tf`` and ``flax`` are compiled by XLA. The statistic reads each row once more. While a row
fits in cache that costs arithmetic alone, which saves a little; beyond the cache it is a trip to memory, which a
partial statistic does not make. The backward pass reads everything in any case.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rmsnorm.call import Spec, resolve
from rmsnorm.cpu import launch, threads
from rmsnorm.cpu.formats import STORAGE
from rmsnorm.variants import Variant

SHAPES = ((4096, 768), (4096, 4096), (64, 262144), (16, 1048576))
SHARES = (None, 0.5, 0.0625)
TURNS = 25


def main(names: list[str]) -> None:
    order = random.Random(0)
    print(f"{threads.available()} threads; median ms, and in brackets the least")
    for name in names:
        for dtype in ("float32", "bfloat16"):
            for shape in SHAPES:
                x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
                calls = MAKERS[name](x, dtype)
                times: dict[float | None, list[float]] = {share: [] for share in SHARES}
                for _ in range(TURNS):
                    for share in order.sample(SHARES, len(SHARES)):
                        start = time.perf_counter()
                        result = calls[share]()
                        times[share].append((time.perf_counter() - start) * 1e3)
                        del result
                cells = []
                for share, found in times.items():
                    ratio = statistics.median(times[None]) / statistics.median(found)
                    cells.append(f"p = {share or 1}: {statistics.median(found):.2f} ({min(found):.2f}), {ratio:.2f}x")
                print(f"{name} {dtype} {shape[0]}x{shape[1]}  " + "   ".join(cells), flush=True)


def _kernels(x: np.ndarray, dtype: str) -> dict[Any, Callable[[], Any]]:
    stored = (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else x
    y = np.zeros(x.shape, STORAGE[dtype])

    def call(share: float | None) -> Callable[[], Any]:
        variant = Variant.get("standard").replace(partial=share)
        plan = launch.plan(resolve("rms_norm", Spec(x.shape, dtype), variant=variant), None, None)
        places = (launch.address(stored), plan.x_bytes, 0, 0, 0, 0, 0, 0, launch.address(y), 0, 0)
        return lambda: plan.run_forward(threads.own_threads, (stored, y), *places)

    return _warm({share: call(share) for share in SHARES})


def _torch(x: np.ndarray, dtype: str) -> dict[Any, Callable[[], Any]]:
    import torch

    from rmsnorm.torch_impl import rms_norm

    given = torch.from_numpy(x).to(getattr(torch, dtype))
    return _warm({share: lambda share=share: rms_norm(given, partial=share) for share in SHARES})


def _tf(x: np.ndarray, dtype: str) -> dict[Any, Callable[[], Any]]:
    import tensorflow as tf

    from rmsnorm.tf_impl import rms_norm

    given = tf.cast(x, dtype)

    def call(share: float | None) -> Callable[[], Any]:
        compiled = tf.function(lambda x: rms_norm(x, partial=share), jit_compile=True)
        return lambda: compiled(given)

    return _warm({share: call(share) for share in SHARES})


def _flax(x: np.ndarray, dtype: str) -> dict[Any, Callable[[], Any]]:
    import jax

    from rmsnorm.flax_impl import rms_norm

    given = jax.numpy.asarray(x).astype(dtype)

    def call(share: float | None) -> Callable[[], Any]:
        compiled = jax.jit(lambda x: rms_norm(x, partial=share))
        return lambda: jax.block_until_ready(compiled(given))

    return _warm({share: call(share) for share in SHARES})


def _warm(calls: dict[Any, Callable[[], Any]]) -> dict[Any, Callable[[], Any]]:
    for call in calls.values():
        call()
    return calls


MAKERS = {"kernels": _kernels, "torch": _torch, "tf": _tf, "flax": _flax}

if __name__ == "__main__":
    unknown = set(sys.argv[1:]) - set(MAKERS)
    if unknown:
        sys.exit(f"got {', '.join(sorted(unknown))}, wanted any of {', '.join(MAKERS)}")
    main(sys.argv[1:] or list(MAKERS))
