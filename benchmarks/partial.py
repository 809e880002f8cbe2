"""Where a partial statistic is faster: the forward pass with a share p of the elements in the statistic, or with all.

    python benchmarks/partial.py [kernels] [torch] [tf] [flax]

The three shares take turns. ``kernels`` are those of rmsnorm.cpu. They write to memory that exists already, so that
page faults do not hide what is saved. ``tf`` and ``flax`` are compiled by XLA. The statistic reads each row once more.
If a row fits in cache, this costs arithmetic alone, and a partial statistic saves a little. If it does not fit, the row
is read from memory once more, which a partial statistic avoids. The backward pass reads everything in any case.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rmsnorm.cpu import launch, threads
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Variant

SHAPES = ((4096, 768), (4096, 4096), (64, 262144), (16, 1048576))
SHARES = (None, 0.5, 0.0625)
TURNS = 25


def main(names: list[str]) -> None:
    order = random.Random(0)
    print(f"{threads.available()} threads; median ms, and the least in brackets")
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
                for share, turns in times.items():
                    ratio = statistics.median(times[None]) / statistics.median(turns)
                    cells.append(f"p = {share or 1}: {statistics.median(turns):.2f} ({min(turns):.2f}), {ratio:.2f}x")
                print(f"{name} {dtype} {shape[0]}x{shape[1]}  " + "   ".join(cells), flush=True)


def _kernels(x: np.ndarray, dtype: str) -> dict[Any, Callable[[], Any]]:
    stored = (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else x
    y = np.zeros_like(stored)

    def call(share: float | None) -> Callable[[], Any]:
        variant = Variant.get("standard").replace(partial=share)
        made = launch.launch_of(resolve("rms_norm", Spec(x.shape, dtype), variant=variant), None, None)

        def run() -> Any:
            count, gomp_parallel = made.forward_threads(threads.own_threads)
            return made.native.forward(
                threads=count, gomp_parallel=gomp_parallel, x=stored, x_step=made.row_bytes, residual=None, scale=None,
                bias=None, mask=None, mask_step=0, mask_stride=0, y=y, h=None, inverse_rms=None,
            )  # fmt: skip

        return run

    return _warm({share: call(share) for share in SHARES})


def _torch(x: np.ndarray, dtype: str) -> dict[Any, Callable[[], Any]]:
    import torch

    from rmsnorm.torch_impl import rms_norm

    tensor = torch.from_numpy(x).to(getattr(torch, dtype))
    return _warm({share: lambda share=share: rms_norm(tensor, partial=share) for share in SHARES})


def _tf(x: np.ndarray, dtype: str) -> dict[Any, Callable[[], Any]]:
    import tensorflow as tf

    from rmsnorm.tf_impl import rms_norm

    tensor = tf.cast(x, dtype)

    def call(share: float | None) -> Callable[[], Any]:
        compiled = tf.function(lambda x: rms_norm(x, partial=share), jit_compile=True)
        return lambda: compiled(tensor)

    return _warm({share: call(share) for share in SHARES})


def _flax(x: np.ndarray, dtype: str) -> dict[Any, Callable[[], Any]]:
    import jax

    from rmsnorm.flax_impl import rms_norm

    array = jax.numpy.asarray(x).astype(dtype)

    def call(share: float | None) -> Callable[[], Any]:
        compiled = jax.jit(lambda x: rms_norm(x, partial=share))
        return lambda: jax.block_until_ready(compiled(array))

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
