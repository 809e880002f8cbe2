"""RMSNorm on the CPU, compiled just in time by numba: for rows in memory, whatever the framework that owns them.

The first call for each pair of formats compiles for some seconds; the code is kept beside the source, or where that
cannot be written in the user's cache folder, or not at all. Nothing here loads numba before it is asked for.
"""

from __future__ import annotations

import os
import warnings
from functools import lru_cache

from rmsnorm.call import Call


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Whether numba works; a warning says so where it does not, unless RMSNORM_CPU_KERNELS=0 asks to do without."""
    if os.environ.get("RMSNORM_CPU_KERNELS") == "0":
        return False
    try:
        import numba  # noqa: F401
    except ImportError as error:  # also where it does not go with the NumPy that is here
        warnings.warn(
            f"rmsnorm: the CPU kernels are not to be had ({error}), and slower code with the same results is taken; "
            "pip install 'rmsnorm[cpu]', or set RMSNORM_CPU_KERNELS=0 to keep it so",
            stacklevel=2,
        )
        return False
    return True


def supports(call: Call) -> bool:
    """Whether there are kernels for a call: for rows along the last axes, which carry the parameters, too."""
    return in_rows(call) and is_available()


def in_rows(call: Call) -> bool:
    """Whether the last axes are normalised and carry the parameters, and there is something to normalise."""
    last = tuple(range(len(call.shape) - len(call.axes), len(call.shape)))
    return call.axes == last == call.feature_axes and 0 not in call.shape
