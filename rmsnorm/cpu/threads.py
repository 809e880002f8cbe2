"""How many threads of this package compute a call. They are in native/threads.cpp."""

from __future__ import annotations

import os

from rmsnorm.specification import environment


def available() -> int:
    """How many threads to use: RMSNORM_NUM_THREADS, else one for each core that the process may use."""
    limit = environment.read("RMSNORM_NUM_THREADS")
    if limit is not None:
        return int(limit)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_threads() -> tuple[int, int]:
    """How many threads of this package, and 0 as they are not OpenMP's: a ``Threads`` of launch.py."""
    return available(), 0
