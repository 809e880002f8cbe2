"""The kernels as XLA calls them: the attribute of a call, which says what native/xla.cpp computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from rmsnorm.cpu import _native
from rmsnorm.cpu.launch import Launch, launch_of, note
from rmsnorm.cpu.threads import available
from rmsnorm.specification.call import Call

_PARALLEL: Final = 2**17  # elements: below, one thread is as fast as two


def forward(call: Call, scale: str | None, bias: str | None) -> np.ndarray:
    """The attribute of a call from x, scale and bias, those that are not None, to y and 1 / rho."""
    launch = launch_of(call, scale, bias)
    note("forward", launch)
    return np.frombuffer(launch.native.xla_forward(_threads(launch)), np.int64)


def backward(
    call: Call, scale: str | None, bias: str | None, wanted: Sequence[bool], *, has_inverse_rms: bool = False,
    has_bias: bool = False, has_dh: bool = False,
) -> np.ndarray:  # fmt: skip
    """The same for the backward pass: from dy, h, 1 / rho, scale, bias and dh to the gradients.

    There may be no 1 / rho, scale, bias and dh. ``wanted`` says which of dx, dscale and dbias there are. No gradient
    needs the bias, but a program may have it among its operands.
    """
    launch = launch_of(call, scale, bias)
    note("backward", launch)
    attribute = launch.native.xla_backward(_threads(launch), has_inverse_rms, has_bias, has_dh, *wanted)
    return np.frombuffer(attribute, np.int64)


def _threads(launch: Launch) -> int:
    return available() if launch.rows * launch.n >= _PARALLEL else 1


def handler() -> Any:
    """The function that XLA calls, in a capsule."""
    return _native.xla_handler()
