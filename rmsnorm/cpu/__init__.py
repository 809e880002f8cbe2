"""RMSNorm on the CPU by kernels in C++, for rows in the memory of any framework.

    launch              what the kernels need for a checked call
    openmp, threads     how many threads, and who starts them
    xla                 a launch as XLA makes it

The kernels are in native/, which the build compiles into the module _native:

    call                what they know of a call
    lanes, formats      eight numbers at a time; the formats
    statistic           rho of a row
    parameters          gains and biases in float64, and the sums for their gradients
    forward, backward   the passes; single is the part of both in float32 arithmetic, cancelled what is computed again
    kernels             the four functions of a level
    driver, threads     rows shared out among threads
    pages               huge pages for large results
    python, xla         the doors
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

from rmsnorm.specification import environment


@lru_cache(maxsize=1)
def is_switched_off() -> bool:
    """Whether RMSNORM_CPU_KERNELS=0 was set when this was first asked, as launches are kept."""
    return environment.read("RMSNORM_CPU_KERNELS") == "0"


@lru_cache(maxsize=1)
def what_is_missing() -> str | None:
    """Why there are no kernels, and what mends that; None if there are.

    Raises:
        ValueError: RMSNORM_CPU_LEVEL is no level, or RMSNORM_HUGE_PAGES neither 0 nor 1.
    """
    wanted = environment.read("RMSNORM_CPU_LEVEL")
    environment.read("RMSNORM_HUGE_PAGES")
    try:
        from rmsnorm.cpu import _native
    except ImportError as error:
        why = f"the module of the kernels cannot be imported ({error})"
        fix = "install the package with a C++ compiler, or in a checkout run `make native`"
    else:
        if _native.level() is not None:
            return None
        why = (
            f"there are no kernels of level {wanted} for this processor"
            if wanted
            else "there are no kernels for this processor"
        )
        fix = "they need x86-64 with AVX2 and FMA, or arm64" + (", or unset RMSNORM_CPU_LEVEL" if wanted else "")
    return f"{why}; {fix}, or set RMSNORM_CPU_KERNELS=0 to hide this warning"


def missing(_: Any = None) -> str | None:
    """Why there are no kernels; None if there are. A warning says so once, unless RMSNORM_CPU_KERNELS=0 is set."""
    if is_switched_off():
        return "RMSNORM_CPU_KERNELS=0 switches the kernels off"
    reason = what_is_missing()
    if reason is not None:
        _warn(reason)
    return reason


@lru_cache(maxsize=1)
def _warn(reason: str) -> None:
    warnings.warn(f"rmsnorm: using slower code with the same results, as {reason}", stacklevel=3)


def is_available() -> bool:
    return missing() is None
