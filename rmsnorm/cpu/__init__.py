"""RMSNorm on the CPU, compiled just in time by numba, for rows in the memory of any framework.

The first call compiles what it needs in a second or two; later processes load that, without numba.

    launch                          a checked call becomes a plan: settings, chunks of rows, threads
    machine_code, cache             what is compiled, loaded, and kept on disk
    openmp, threads                 who computes which chunk
    arrays; xla                     for NumPy's arrays; for XLA. PyTorch and TensorFlow use launch.

The rest is what numba compiles, and is imported for nothing else:

    forward, backward               the kernels; they are made of statistic and formats
    gated                           the kernels for norms in groups, or with a gate
    bfloat16, exact                 the same rows in float32 arithmetic, and with error terms for float64
    parameters, tasks, system       gains and their gradients; what each thread does; memory and processor
    xla_handler, xla_api            what XLA calls, without Python
"""

from __future__ import annotations

import os
import warnings
from functools import lru_cache
from importlib.util import find_spec

from rmsnorm import errors
from rmsnorm.call import Call


def is_switched_off() -> bool:
    return os.environ.get("RMSNORM_CPU_KERNELS") == "0"


@lru_cache(maxsize=1)
def what_is_missing() -> str | None:
    """Why the kernels cannot be compiled, and what mends that; None if they can."""
    try:
        if find_spec("numba") is None:
            raise ModuleNotFoundError("No module named 'numba'")
        from rmsnorm.cpu import launch

        launch.run()  # imports numba if it is not compiled yet
    except ImportError as error:  # also a numba that does not support the installed NumPy
        state = "is not installed" if isinstance(error, ModuleNotFoundError) else "cannot be imported"
        return f"numba {state} ({error}); {errors.install('cpu')}, or set RMSNORM_CPU_KERNELS=0 to hide this warning"
    return None


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Whether numba works. If it does not, a warning says so, unless RMSNORM_CPU_KERNELS=0 switches the kernels off."""
    if is_switched_off():
        return False
    missing = what_is_missing()
    if missing is not None:
        warnings.warn(f"rmsnorm: using slower code with the same results, as {missing}", stacklevel=2)
    return missing is None


def supports(call: Call) -> bool:
    """Whether the kernels can compute a call: numba works, and ``in_rows`` holds."""
    return in_rows(call) and is_available()


def in_rows(call: Call) -> bool:
    """Whether the last axes are normalised and carry the parameters, and no axis is empty."""
    return call.has_last_axes and call.axes == call.feature_axes and 0 not in call.shape


def supports_gated(call: Call, gate: str | None) -> bool:
    """Whether the kernels for gates and groups can compute a call without a bias: at most 32 bits, plain statistics.

    The last axes are normalised, and the parameters are along these, or along more of the last axes.
    """
    last = tuple(range(len(call.shape) - len(call.feature_axes), len(call.shape)))
    rounded_offset = call.norm is not None and bool(call.variant.scale_offset)
    return (
        (gate is not None or call.axes != call.feature_axes)
        and call.has_last_axes and call.feature_axes == last and len(call.axes) <= len(last) and 0 not in call.shape
        and "float64" not in (call.x, call.result, gate)
        and call.k == call.n and call.variant.statistic != "variance" and not rounded_offset
        and is_available()
    )  # fmt: skip
