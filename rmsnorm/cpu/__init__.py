"""RMSNorm on the CPU by kernels in C++, for rows in the memory of any framework.

    prepared            a call that is checked and planned once, for every framework
    launch              a checked call becomes a plan, which computes arrays
    openmp, threads     how many threads, and who starts them
    xla                 a plan as XLA calls it

The kernels are in native/, which the build compiles into the module _native:

    call                what they know of a call
    lanes, formats      eight numbers at a time; the four formats
    statistic           h = x + residual, and rho
    forward, backward   the passes; single is the part of both in float32 arithmetic, cancelled what is computed again
    general, row, gate  rows with masks, gates or float64
    driver, threads     rows shared out among threads
    python, xla         the doors
"""

from __future__ import annotations

import warnings
from functools import lru_cache

from rmsnorm.specification import environment
from rmsnorm.specification.call import Call


@lru_cache(maxsize=1)
def is_switched_off() -> bool:
    """Whether RMSNORM_CPU_KERNELS=0 was set when this was first asked. Plans are kept, so the answer may not change."""
    return environment.read("RMSNORM_CPU_KERNELS") == "0"


@lru_cache(maxsize=1)
def what_is_missing() -> str | None:
    """Why there are no kernels, and what mends that; None if there are.

    Raises:
        ValueError: RMSNORM_CPU_LEVEL is no level.
    """
    wanted = environment.read("RMSNORM_CPU_LEVEL")
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


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Whether there are kernels. Without any a warning says so, unless RMSNORM_CPU_KERNELS=0 switches them off."""
    if is_switched_off():
        return False
    missing = what_is_missing()
    if missing is not None:
        warnings.warn(f"rmsnorm: using slower code with the same results, as {missing}", stacklevel=2)
    return missing is None


def supports(call: Call) -> bool:
    """Whether the kernels can compute a call. One that is slow for want of kernels gives the warning, once.

    The last axes are normalised, and the parameters are along these, or along more of the last axes.
    """
    return refusal(call) is None and is_available()


def why_not(call: Call) -> str | None:
    """Why ``supports`` is False; None if it is True."""
    if is_switched_off():
        return "RMSNORM_CPU_KERNELS=0 switches the kernels off"
    return what_is_missing() or refusal(call)


def refusal(call: Call) -> str | None:
    """Why no kernel could compute a call."""
    if 0 in call.shape:
        return "x has no elements"
    if not call.has_last_axes:
        return "the normalised axes are not the last ones"
    if not call.has_neighbours:
        return "the axes of the parameters are not next to each other"
    return None
