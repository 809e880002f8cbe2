"""Which engine computes a call: the kernels, or operations that XLA compiles. Nothing else decides that.

``engine_of`` is asked twice: about the arrays when a call is traced, and about the devices when its program is lowered.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import jax
from jax import ffi

from rmsnorm.cpu import prepared
from rmsnorm.cpu.prepared import Prepared
from rmsnorm.flax_impl import private
from rmsnorm.specification.absent import without_none
from rmsnorm.specification.call import Call


class Engine(Enum):
    """What computes a call."""

    KERNELS = "kernels"  # those of rmsnorm.cpu
    OPERATIONS = "operations of JAX"


class Context(NamedTuple):
    """What is around a call.

    Attributes:
        is_spread: a row is spread over a named axis.
        is_divided: types say that each device has its own part of an array.
        is_mixed: the gradient of x + residual is wanted in another dtype than its own.
        platform: that of the one device of this process that the program is for, as JAX names it; empty if there is no
            such device, and None while the program is traced.
    """

    is_spread: bool = False
    is_divided: bool = False
    is_mixed: bool = False
    platform: str | None = None


def engine_of(call: Call, context: Context) -> tuple[Engine, str | None]:
    """The engine, and why it is not the kernels; None if it is."""
    reason = _reason(call, context)
    return Engine.KERNELS if reason is None else Engine.OPERATIONS, reason


def _reason(call: Call, context: Context) -> str | None:
    if not all(isinstance(size, int) for size in call.shape):
        return "a size of x is not known before the program runs"
    if context.is_spread:
        return "a row is spread over several devices"
    if context.is_divided:
        return "each device has a part of an array"
    if context.is_mixed:
        return "the gradient of x and that of the residual have different dtypes"
    if context.platform is None:
        return prepared.refusal(call, None)
    if context.platform == "":
        return "an array is not on one device"
    if context.platform != "cpu":
        return "there are no kernels for its device"
    if (reason := prepared.why_not(call)) is not None:
        return reason
    return None if is_registered() else "this jaxlib does not accept the kernels"


def context_of(arrays: Iterable[Any], **others: Any) -> Context:
    """The context of a call with these arrays, some of which may be None."""
    return Context(is_divided=any(map(private.is_divided, without_none(arrays))), **others)


def why_not(checked: Prepared, arrays: Iterable[Any]) -> str | None:
    """Why no kernel is in the program that JAX compiles for these arrays; None if there is one."""
    arrays = [array for array in arrays if isinstance(array, jax.Array)]
    devices = {device for array in arrays for device in array.devices()}
    platform = devices.pop().platform if len(devices) == 1 else ""
    return engine_of(checked.call, context_of(arrays, platform=platform))[1]


@lru_cache(maxsize=1)
def is_registered() -> bool:
    """Whether XLA accepts the handler. A warning says so if it does not, as with another version of the interface."""
    from rmsnorm.cpu import xla

    try:
        ffi.register_ffi_target("rmsnorm", xla.handler(), platform="cpu")
    except jax.errors.JaxRuntimeError as error:
        warnings.warn(
            f"rmsnorm: this jaxlib does not accept the CPU kernels; XLA compiles slower code instead ({error}); "
            "install another version of jaxlib, or set RMSNORM_CPU_KERNELS=0 to hide this warning",
            stacklevel=2,
        )
        return False
    return True
