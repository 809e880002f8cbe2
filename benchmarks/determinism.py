"""What it costs that parameter gradients are summed in an order of the shape alone: the backward pass in the kernels'
chunks, beside one chunk for each thread, whose bits would change with the number of threads.

On PyTorch's threads where it is installed, and on those of the other frameworks; these are woken for large inputs only,
and beside a small one stands a single chunk.

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


def measure(whose: str, crew: launch.Crew) -> None:
    order = random.Random(0)
    workers, parallel = crew()
    print(f"{whose}, {workers}; the backward pass with dscale and dbias, float32; median of {TURNS} turns")
    for rows, n in SHAPES:
        call = resolve("rms_norm", Spec((rows, n), "float32"), variant=Variant.get("standard"))
        plan = launch.plan(call, "float32", "float32")
        draw = np.random.default_rng(0)
        arrays = [*draw.normal(size=(3, rows, n)).astype(np.float32), *np.ones((3, n), np.float32), np.ones(rows)]
        pieces = workers if parallel or rows * n >= launch._POOL else 1
        steps = [_step(each, crew, *arrays) for each in (plan, plan._replace(chunk=-(-rows // pieces)))]
        times: list[list[float]] = [[], []]
        for _ in range(TURNS):
            for which in order.sample((0, 1), 2):
                start = time.perf_counter()
                steps[which]()
                times[which].append(time.perf_counter() - start)
        fixed, free = (statistics.median(found) * 1e3 for found in times)
        print(f"{rows}x{n}: {fixed:.3f} ms in the order of the shape, {free:.3f} ms in any; {fixed / free:.2f} times")


def _step(plan: launch.Plan, crew: launch.Crew, *arrays: np.ndarray) -> Callable[[], None]:
    x, dy, dx, scale, dscale, dbias, inverse_rms = (launch.address(array) for array in arrays)
    places = (x, plan.x_bytes, scale, 0, 0, 0, inverse_rms, dy, 0, dx, dscale, dbias)

    def run() -> None:
        plan.run_backward(crew, (), *places)

    run()
    return run


if __name__ == "__main__":
    main()
