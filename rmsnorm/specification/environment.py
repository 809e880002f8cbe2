"""The environment variables of this package, each with the values that it may have. An empty one counts as not set.

RMSNORM_CPU_KERNELS     0: no compiled kernels. It is read once, when the first call asks for them.
RMSNORM_CPU_LEVEL       v3, v4, v4-bf16 or arm64: kernels for these processors, in place of the best that there are
RMSNORM_GPU_FP64        0: GPUs compute almost nothing in float64; 1: they do; in place of what suits the card
RMSNORM_GPU_KERNELS     0: no kernels for GPUs; interpret: an interpreter runs them on arrays of the CPU
RMSNORM_HUGE_PAGES      0: no advice of huge pages for large results. It is read once, with the first of them.
RMSNORM_NUM_THREADS     how many threads compute a call
RMSNORM_OPENMP          0: threads of this package in place of PyTorch's
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from rmsnorm.specification import errors

MOST_THREADS: Final = 1024  # each takes memory; no machine has more cores today


def _is_count(value: str) -> bool:
    return value.isascii() and value.isdecimal() and len(value) <= 9 and 1 <= int(value) <= MOST_THREADS


_RULES: Final[dict[str, tuple[Callable[[str], bool], str]]] = {  # whether a value is allowed, and which ones are
    "RMSNORM_CPU_KERNELS": (("0", "1").__contains__, "0 or 1"),
    "RMSNORM_CPU_LEVEL": (("v3", "v4", "v4-bf16", "arm64").__contains__, "v3, v4, v4-bf16 or arm64"),
    "RMSNORM_GPU_FP64": (("0", "1").__contains__, "0 or 1"),
    "RMSNORM_GPU_KERNELS": (("0", "1", "interpret").__contains__, "0, 1 or interpret"),
    "RMSNORM_HUGE_PAGES": (("0", "1").__contains__, "0 or 1"),
    "RMSNORM_NUM_THREADS": (_is_count, f"a number of threads, 1 to {MOST_THREADS}"),
    "RMSNORM_OPENMP": (("0", "1").__contains__, "0 or 1"),
}


def read(name: str) -> str | None:
    """The value of a variable; None if it is not set.

    Raises:
        ValueError: the variable may not have this value.
    """
    value = os.environ.get(name)
    return _checked(name, value) if value else None


@lru_cache(maxsize=64)
def _checked(name: str, value: str) -> str:
    is_allowed, want = _RULES[name]
    if not is_allowed(value):
        raise errors.out_of_domain("rmsnorm", f"the environment variable {name}", value, want, "change or unset it")
    return value


def check() -> None:
    """Reads every variable, so that a command says at the start which one has a wrong value."""
    for name in _RULES:
        read(name)
