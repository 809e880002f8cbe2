"""The OpenMP threads that PyTorch keeps running: they start in a few microseconds, and none compete.

GCC compiles a parallel region to a call of GOMP_parallel. That of the libgomp that PyTorch has loaded starts the
threads of this libgomp.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache
from typing import Final

from rmsnorm.specification import environment

_PROCESS: Final = os.getpid()
_FORKED: Final = 0x40  # PF_FORKNOEXEC of Linux: the process is forked, and has executed no program since


def gomp_parallel() -> int:
    """The address of GOMP_parallel.

    0 if no libgomp is loaded, or more than one; with RMSNORM_OPENMP=0; and in a forked process, where it would wait for
    threads of the parent. What the parent did before this package was imported, nobody knows, so that Linux is asked,
    too, whether the process is forked. 0 also where Linux does not say that, as in a sandbox without /proc, or where
    the file of libgomp was replaced after it was loaded.
    """
    return _gomp_parallel() if os.getpid() == _PROCESS else 0


@lru_cache(maxsize=1)
def _gomp_parallel() -> int:
    if sys.platform != "linux" or environment.read("RMSNORM_OPENMP") == "0":
        return 0
    try:
        return _loaded_parallel()
    except (OSError, AttributeError):
        return 0


def _loaded_parallel() -> int:
    with open("/proc/self/stat") as stat:
        flags = stat.read().rpartition(")")[2].split()[6]  # after the name of the program, which may have any character
    if int(flags) & _FORKED:
        return 0
    with open("/proc/self/maps") as maps:
        loaded = {line.split(maxsplit=5)[5].strip() for line in maps if "libgomp" in line}
    if len(loaded) != 1:
        return 0
    function = ctypes.CDLL(loaded.pop(), mode=os.RTLD_NOLOAD | os.RTLD_NOW).GOMP_parallel
    return ctypes.cast(function, ctypes.c_void_p).value or 0
