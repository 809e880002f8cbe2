"""RMSNorm on the CPU by compiled kernels, for rows in the memory of any framework.

A wheel has a library of the kernels that most calls need. Others, and all in a checkout, are compiled by numba when
they are first called, in a second or two; later processes load that, without numba.

    launch                          a checked call becomes a plan: settings, chunks of rows, threads
    machine_code, target            where the kernels are: in the library for the processor, or else
    compiler, cache                 compiled, and kept on disk
    build                           makes the library
    openmp, threads                 who computes which chunk
    arrays; xla                     for NumPy's arrays; for XLA. PyTorch and TensorFlow use launch.

The rest is what is compiled, and is imported for nothing else:

    forward, backward               the kernels; they are made of statistic and formats
    gated                           the kernels for norms in groups, or with a gate
    bfloat16, exact                 the same rows in float32 arithmetic, and with error terms for float64
    parameters, tasks, system       gains and their gradients; what each thread does; memory and processor
    xla_handler, xla_api            what XLA calls, without Python
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Final

from rmsnorm import errors
from rmsnorm.call import Call

_NO_FORMATS: Final = "the wheel has no kernel for these formats, and numba, which would compile it, is not installed"
_SPECIAL: Final = "a kernel for gates and groups"


def is_switched_off() -> bool:
    return os.environ.get("RMSNORM_CPU_KERNELS") == "0"


@lru_cache(maxsize=1)
def what_is_missing() -> str | None:
    """Why there are no kernels, and what mends that; None if there are: in the library, or by numba."""
    from rmsnorm.cpu import launch, machine_code

    try:
        if machine_code.library() is None and find_spec("numba") is None:
            raise ModuleNotFoundError("No module named 'numba'")
        launch.run()  # imports numba if it is in no library and not compiled yet
    except ImportError as error:  # also a numba that does not support the installed NumPy
        state = "is not installed" if isinstance(error, ModuleNotFoundError) else "cannot be imported"
        return (
            f"there is no library of kernels for this processor, and numba {state} ({error}); "
            f"{errors.install('jit')}, or set RMSNORM_CPU_KERNELS=0 to hide this warning"
        )
    return None


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
    """Whether the kernels can compute a call: there are such kernels, and ``in_rows`` holds."""
    return in_rows(call) and has_kernels(call.x, call.result, call.norm, call.product)


def supports_gated(call: Call, gate: str | None) -> bool:
    """Whether the kernels for gates and groups can compute a call without a bias: at most 32 bits, plain statistics.

    The last axes are normalised, and the parameters are along these, or along more of the last axes.
    """
    return _is_special(call, gate) and _gated_refusal(call, gate) is None and _has_gated_kernels(call, gate)


def why_not(call: Call, gate: str | None, arrays: Sequence[str] = ()) -> str | None:
    """Why no kernel can compute a call with a gate of that dtype, and with those of bias, mask and residual.

    None if one can.
    """
    if is_switched_off():
        return "RMSNORM_CPU_KERNELS=0 switches the kernels off"
    if (missing := what_is_missing()) is not None:
        return missing
    if not _is_special(call, gate):
        return _refusal(call) or (None if supports(call) else _NO_FORMATS)
    if (refusal := _gated_refusal(call, gate)) is not None:
        return refusal
    if arrays:
        return f"{_SPECIAL} takes no {' and no '.join(arrays)}"
    return None if _has_gated_kernels(call, gate) else _NO_FORMATS


def in_rows(call: Call) -> bool:
    """Whether the last axes are normalised and carry the parameters, and no axis is empty."""
    return call.axes == call.feature_axes and _refusal(call) is None


def _is_special(call: Call, gate: str | None) -> bool:
    """Whether the kernels for gates and groups are asked."""
    return gate is not None or call.axes != call.feature_axes


def _refusal(call: Call) -> str | None:
    """Why x has no rows in which the normalised elements follow each other."""
    if 0 in call.shape:
        return "x has no elements"
    return None if call.has_last_axes else "the normalised axes are not the last ones"


def _gated_refusal(call: Call, gate: str | None) -> str | None:
    """Why a kernel for gates and groups cannot compute a call."""
    if (refusal := _refusal(call)) is not None:
        return refusal
    last = tuple(range(len(call.shape) - len(call.feature_axes), len(call.shape)))
    if call.feature_axes != last:
        return "the parameters are not along the last axes"
    if len(call.axes) > len(last):
        return "the parameters are along fewer axes than the normalised ones"
    if "float64" in (call.x, call.result, gate):
        return f"{_SPECIAL} has at most 32 bits"
    if call.k != call.n:
        return f"{_SPECIAL} takes all elements into the statistic"
    if call.variant.statistic == "variance":
        return f"{_SPECIAL} subtracts no mean"
    if call.norm is not None and call.variant.scale_offset:
        return f"{_SPECIAL} does not round 1 + w first"
    return None


def has_kernels(x: str, y: str, norm: str | None, product: str) -> bool:
    """Whether there are kernels for the formats of a call: a library has them with every option, or not at all."""
    return is_available() and _has_formats(x, y, norm, product)


@lru_cache(maxsize=256)
def _has_formats(x: str, y: str, norm: str | None, product: str) -> bool:
    from rmsnorm.cpu import machine_code

    key = machine_code.Key("forward", x, y, norm, product if norm else None)
    return _is_there(machine_code.is_ready(*key.function), f"from {x} to {y}")


def _is_there(is_ready: bool, what: str) -> bool:
    """Whether the library has kernels, or numba compiles them. If neither, a warning says so, once for each."""
    from rmsnorm.cpu import machine_code

    if is_ready or machine_code.can_compile():
        return True
    warnings.warn(
        f"rmsnorm: using slower code with the same results {what}, as the wheel has no such kernel, and numba, which "
        f"would compile it, is not installed; {errors.install('jit')}, or set RMSNORM_CPU_KERNELS=0 to hide this",
        stacklevel=2,
    )
    return False


def _has_gated_kernels(call: Call, gate: str | None) -> bool:
    if not is_available():
        return False
    from rmsnorm.cpu import launch, machine_code

    kernels = [launch.GatedKernels(kind, call, gate) for kind in machine_code.KINDS]
    what = (
        f"from {call.x} to {call.result}, with a gate in {gate}"
        if gate
        else f"from {call.x} to {call.result} in groups"
    )
    return _has_functions(tuple(tuple(own.key) for own in kernels), what)


@lru_cache(maxsize=256)
def _has_functions(keys: tuple[tuple[str, ...], ...], what: str) -> bool:
    from rmsnorm.cpu import machine_code

    return _is_there(all(machine_code.is_ready("gated", *key) for key in keys), what)
