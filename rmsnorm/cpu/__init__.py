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
    gate                            the factor f(z) of a gate, and its derivative
    bfloat16, exact                 the same rows in float32 arithmetic, and with error terms for float64
    parameters, tasks, system       gains and their gradients; what each thread does; memory and processor
    xla_handler, xla_api            what XLA calls, without Python
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib.util import find_spec
from typing import Final

from rmsnorm import environment, errors
from rmsnorm.call import Call

_NO_FORMATS: Final = "the wheel has no kernel for these formats, and numba, which would compile it, is not installed"


@lru_cache(maxsize=1)
def is_switched_off() -> bool:
    """Whether RMSNORM_CPU_KERNELS=0 was set when this was first asked. Plans are kept, so the answer may not change."""
    return environment.read("RMSNORM_CPU_KERNELS") == "0"


@lru_cache(maxsize=1)
def what_is_missing() -> str | None:
    """Why there are no kernels, and what mends that; None if there are: in the library, or by numba."""
    from rmsnorm.cpu import launch, machine_code, target

    try:
        if machine_code.library() is None and find_spec("numba") is None:
            raise ModuleNotFoundError("No module named 'numba'")
        launch.run()  # imports numba if it is in no library and not compiled yet
    except ImportError as error:  # also a numba that does not support the installed NumPy
        state = "is not installed" if isinstance(error, ModuleNotFoundError) else "cannot be imported"
        folder = machine_code.library_folder()
        levels = [level for level in target.LEVELS if folder and (folder / machine_code.library_name(level)).exists()]
        others = f" (only for {' and '.join(levels)}, of another machine or of other sources)" if levels else ""
        return (
            f"there is no library of kernels for this processor{others}, and numba {state} ({error}); "
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


def supports(call: Call, gate: str | None = None, arrays: tuple[str, ...] = ()) -> bool:
    """Whether the kernels can compute a call with a gate of that dtype, and with those of bias, mask and residual.

    The last axes are normalised, and the parameters are along these, or along more of the last axes.
    """
    return refusal(call, gate) is None and has_kernels(call, gate, arrays)


def why_not(call: Call, gate: str | None = None, arrays: tuple[str, ...] = ()) -> str | None:
    """Why ``supports`` is False; None if it is True."""
    if is_switched_off():
        return "RMSNORM_CPU_KERNELS=0 switches the kernels off"
    if (missing := what_is_missing()) is not None:
        return missing
    return refusal(call, gate) or (None if has_kernels(call, gate, arrays) else _NO_FORMATS)


def refusal(call: Call, gate: str | None = None) -> str | None:
    """Why no kernel could compute a call, whatever is compiled."""
    if 0 in call.shape:
        return "x has no elements"
    if not call.has_last_axes:
        return "the normalised axes are not the last ones"
    if call.axes != call.feature_axes:
        if call.feature_axes != tuple(range(len(call.shape) - len(call.feature_axes), len(call.shape))):
            return "the parameters are not along the last axes"
        if len(call.axes) > len(call.feature_axes):
            return "the parameters are along fewer axes than the normalised ones"
    if gate is not None and "float64" in (call.x, call.result, gate):
        return "a kernel with a gate has at most 32 bits"
    return None


def has_kernels(call: Call, gate: str | None = None, arrays: tuple[str, ...] = ()) -> bool:
    """Whether there are kernels for the formats and options of a call that is not refused."""
    formats = call.x, call.result, call.norm, call.product if call.norm else None
    if gate is None:  # a library has the kernels for such formats with every option, or not at all
        return has_formats(*formats)
    gated = f"{call.variant.gate_function}-{call.variant.gate_position}-{gate}"
    return has_formats(*formats, gated, (*arrays, call.variant.statistic))


def has_formats(
    x: str, y: str, norm: str | None, product: str | None, gate: str = "", options: tuple[str, ...] = ()
) -> bool:
    """The same, from the parts of a call on which it depends."""
    return is_available() and _has_formats(x, y, norm, product, gate, options)


@lru_cache(maxsize=256)
def _has_formats(x: str, y: str, norm: str | None, product: str | None, gate: str, options: tuple[str, ...]) -> bool:
    """Whether the library has kernels, or numba compiles them. If neither, a warning says so, once for each."""
    from rmsnorm.cpu import machine_code

    masked = "mask" in options or "variance" in options
    present = {"mask": masked, "other": "residual" in options and not masked, "bias": "bias" in options}
    named = tuple(name for name, is_set in present.items() if is_set)
    key = machine_code.Key("forward", x, y, norm, product, named, gate)
    if machine_code.can_compile() or machine_code.is_ready(*key.function):
        return True
    what = f"from {x} to {y}" + (f" with a {gate.replace('-', ' ')} gate" if gate else "")
    beside = f" and {' and '.join(named)}" if named else ""
    warnings.warn(
        f"rmsnorm: using slower code with the same results {what}{beside}, as the wheel has no such kernel, and numba, "
        f"which would compile it, is not installed; {errors.install('jit')}, or set RMSNORM_CPU_KERNELS=0 to hide this",
        stacklevel=2,
    )
    return False
