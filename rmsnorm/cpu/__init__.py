"""RMSNorm on the CPU, compiled just in time by numba, for rows in the memory of any framework.

The first call for each pair of formats takes some seconds to compile. Nothing here loads numba before it is needed.

    launch                          a checked call becomes a plan: settings, chunks of rows, threads
    openmp, threads, tasks          which thread computes which chunk
    forward, backward               the kernels; they are made of statistic, parameters, settings and formats
    bfloat16, exact                 the same rows in float32 arithmetic, and with error terms for float64
    arrays; xla, xla_api, system    for NumPy's arrays; for XLA, without Python. PyTorch and TensorFlow use launch.
"""

from __future__ import annotations

import os
import warnings
from functools import lru_cache
from typing import Any

from rmsnorm.call import Call


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Whether numba works. If it does not, a warning says so, unless RMSNORM_CPU_KERNELS=0 switches the kernels off."""
    if os.environ.get("RMSNORM_CPU_KERNELS") == "0":
        return False
    try:
        import numba  # noqa: F401
    except ImportError as error:  # also a numba that does not support the installed NumPy
        state = "is not installed" if isinstance(error, ModuleNotFoundError) else "cannot be imported"
        warnings.warn(
            f"rmsnorm: numba {state}; using slower code with the same results ({error}); "
            "pip install 'rmsnorm[cpu]', or set RMSNORM_CPU_KERNELS=0 to hide this warning",
            stacklevel=2,
        )
        return False
    return True


def supports(call: Call) -> bool:
    """Whether the kernels can compute a call: numba works, and ``in_rows`` holds."""
    return in_rows(call) and is_available()


def in_rows(call: Call) -> bool:
    """Whether the last axes are normalised and carry the parameters, and no axis is empty."""
    return call.has_last_axes and call.axes == call.feature_axes and 0 not in call.shape


def kernel(function: Any) -> Any:
    """Compiles a function when it is first called.

    The compiled code is kept beside the source; if that folder cannot be written to, in the user's cache folder; if
    that cannot be written to either, in memory alone.
    """
    from numba import njit

    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # neither folder can be written to
        return njit(**options)(function)
