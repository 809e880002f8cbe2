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
    """The attribute of a call from x, scale and bias, those that are not None, to y."""
    launch = launch_of(call, scale, bias)
    note("forward", launch)
    return np.frombuffer(launch.native.xla_forward(_threads(launch)), np.int64)


def backward(call: Call, scale: str | None, bias: str | None, wanted: Sequence[bool], *, has_dh: bool) -> np.ndarray:
    """The same for the backward pass: from dy, h, scale and dh, of which the last two may be missing, to the gradients.

    ``wanted`` says which of dx, dscale and dbias there are.
    """
    launch = launch_of(call, scale, bias)
    note("backward", launch)
    return np.frombuffer(launch.native.xla_backward(_threads(launch), has_dh, *wanted), np.int64)


def _threads(launch: Launch) -> int:
    return available() if launch.rows * launch.n >= _PARALLEL else 1


def handler() -> Any:
    """The function that XLA calls, in a capsule."""
    return _native.xla_handler()
