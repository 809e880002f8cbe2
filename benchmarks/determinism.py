"""What it costs to sum parameter gradients in an order that depends on the shape alone.

The backward pass in the kernels' chunks is timed beside one chunk for each thread, whose bits would change with the
number of threads. It runs on the threads of rmsnorm, and on PyTorch's if PyTorch is installed. The threads of rmsnorm
are woken for large inputs only: for a small one the comparison is with a single chunk.

    python benchmarks/determinism.py
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np

from rmsnorm.call import Spec, resolve
from rmsnorm.cpu import launch, threads
from rmsnorm.variants import Variant

SHAPES = ((32, 768), (128, 4096), (512, 768), (2048, 1024), (8192, 1024), (4096, 4096))
TURNS = 41


def main() -> None:
    measure("own threads", threads.own_threads)
    if find_spec("torch"):
        from rmsnorm.torch_impl import rows

        measure("PyTorch's threads", rows.openmp_threads)


def measure(whose: str, choose_threads: launch.Threads) -> None:
    order = random.Random(0)
    count, gomp_parallel = choose_threads()
    print(f"{whose}, {count}; the backward pass with dscale and dbias, float32; median of {TURNS} turns")
    for rows, n in SHAPES:
        call = resolve("rms_norm", Spec((rows, n), "float32"), variant=Variant.get("standard"))
        plan = launch.plan(call, "float32", "float32")
        draw = np.random.default_rng(0)
        arrays = [*draw.normal(size=(3, rows, n)).astype(np.float32), *np.ones((3, n), np.float32), np.ones(rows)]
        pieces = count if gomp_parallel or rows * n >= launch.POOL else 1
        plans = plan, plan._replace(chunk=-(-rows // pieces))
        steps = [_step(candidate, choose_threads, *arrays) for candidate in plans]
        times: list[list[float]] = [[], []]
        for _ in range(TURNS):
            for which in order.sample((0, 1), 2):
                start = time.perf_counter()
                steps[which]()
                times[which].append(time.perf_counter() - start)
        fixed, free = (statistics.median(turns) * 1e3 for turns in times)
        print(f"{rows}x{n}: {fixed:.3f} ms in the order of the shape, {free:.3f} ms in any; {fixed / free:.2f} times")


def _step(plan: launch.Plan, choose_threads: launch.Threads, *arrays: np.ndarray) -> Callable[[], None]:
    x, dy, dx, scale, dscale, dbias, inverse_rms = (launch.address(array) for array in arrays)
    arguments = (x, plan.x_bytes, scale, 0, 0, 0, inverse_rms, dy, 0, dx, dscale, dbias)

    def run() -> None:
        plan.run_backward(choose_threads, (), *arguments)

    run()
    return run


if __name__ == "__main__":
    main()
