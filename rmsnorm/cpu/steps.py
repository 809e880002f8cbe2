"""The job of a step of a recurrent cell, in the words of settings.py, and what computes it; without numba."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np

from rmsnorm.cpu import launch, machine_code
from rmsnorm.cpu.settings import STEP_ARGUMENTS, STEP_HEAD

_LEAST: Final = 2**12  # numbers that a thread takes at once
_PARALLEL: Final = 2**15  # numbers of a step: below, one thread is as fast as two


def parts(rows: int, width: int) -> int:
    """In how many parts rows are shared out: it depends on the shape alone, and so does the order of sums."""
    return -(-rows // _rows_of_part(rows, width))


def _rows_of_part(rows: int, width: int) -> int:
    return max(1, -(-_LEAST // width), -(-rows // 16))


def job(
    kernel: str, dtype: str, shape: tuple[int, int, int], counted: tuple[int, int], eps: float,
    threads: tuple[int, int], arguments: Mapping[str, int],
) -> np.ndarray:  # fmt: skip
    """A job for ``run``.

    Args:
        kernel: one of STEP_ARGUMENTS.
        shape: rows, features of a state, and numbers of a row of ``a``.
        threads: as of launch.Threads.
        arguments: those of the kernel, by their names.
    """
    rows, n, width = shape
    count, parallel = threads if rows * width >= _PARALLEL else (1, 0)
    head = {
        "kernel": machine_code.address("recurrent", kernel, dtype), "rows": rows, "n": n, "first": counted[0],
        "second": counted[1], "eps": int(np.float64(eps).view(np.int64)), "time": 0, "step": _rows_of_part(rows, width),
        "next": 0, "work": machine_code.address("recurrent", "work"), "threads": count,
        "parallel": parallel if count > 1 else 0,
    }  # fmt: skip
    return np.array([head[name] for name in STEP_HEAD] + [arguments[name] for name in STEP_ARGUMENTS[kernel]], np.int64)


@lru_cache(maxsize=1)
def run() -> Callable[[int, int], Any]:
    """``run`` of recurrent.py: computes the step of a job, which is at an address, at a time."""
    return launch.method(b"step", machine_code.address("recurrent", "run"))
