"""Where a partial statistic pays: the forward pass with p of the elements in the statistic, beside all of them.

    python benchmarks/partial.py

Into memory that is there already, so that page faults do not hide what is saved; the three take turns. The statistic
reads each row once more. While a row fits in cache that costs arithmetic alone, which saves a little; beyond the cache
it is a trip to memory, which a partial statistic does not make. The backward pass reads everything in any case.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from rmsnorm.call import Spec, resolve
from rmsnorm.cpu import launch, threads
from rmsnorm.cpu.formats import STORAGE
from rmsnorm.variants import Variant

SHAPES = ((4096, 768), (4096, 4096), (64, 262144), (16, 1048576))
SHARES = (None, 0.5, 0.0625)
TURNS = 25


def main() -> None:
    order = random.Random(0)
    print(f"{threads.available()} threads; median ms, and in brackets the least")
    for dtype in ("float32", "bfloat16"):
        for shape in SHAPES:
            x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
            x = (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else x
            y = np.zeros(shape, STORAGE[dtype])
            calls = {share: _call(dtype, share, x, y) for share in SHARES}
            times: dict[float | None, list[float]] = {share: [] for share in SHARES}
            for _ in range(TURNS):
                for share in order.sample(SHARES, len(SHARES)):
                    start = time.perf_counter()
                    calls[share]()
                    times[share].append((time.perf_counter() - start) * 1e3)
            cells = []
            for share, found in times.items():
                ratio = statistics.median(times[None]) / statistics.median(found)
                cells.append(f"p = {share or 1}: {statistics.median(found):.2f} ({min(found):.2f}), {ratio:.2f}x")
            print(f"{dtype} {shape[0]}x{shape[1]}  " + "   ".join(cells), flush=True)


def _call(dtype: str, share: float | None, x: np.ndarray, y: np.ndarray) -> Callable[[], None]:
    variant = Variant.get("standard").replace(partial=share)
    plan = launch.plan(resolve("rms_norm", Spec(x.shape, dtype), variant=variant), None, None)
    places = (launch.address(x), plan.x_bytes, 0, 0, 0, 0, 0, 0, launch.address(y), 0, 0)

    def run() -> None:
        plan.run_forward(threads.crew, (), *places)

    run()
    return run


if __name__ == "__main__":
    main()
