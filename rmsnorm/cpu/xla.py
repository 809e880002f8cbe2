"""The kernels as XLA calls them: the attribute of a call, which says what the handler of xla_handler.py computes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

import numpy as np

from rmsnorm.call import Call
from rmsnorm.cpu import machine_code
from rmsnorm.cpu.launch import Plan, kernel_key, load_tasks, plan
from rmsnorm.cpu.settings import NO_KERNEL, NO_MEMORY, NUMBER, OPERAND, RESULT, SPREAD
from rmsnorm.cpu.threads import available

_PARALLEL: Final = 2**17  # elements: below, one thread is as fast as two

_no_memory = ctypes.create_string_buffer(b"rmsnorm: no memory for the gains and sums of a call")
_no_kernel = ctypes.create_string_buffer(
    b"rmsnorm: the program was compiled in another process and its kernels are not in this one; trace it here"
)


def forward(call: Call, scale: str | None, bias: str | None, mask: tuple[int, int] | None) -> np.ndarray:
    """The attribute of a call from x, scale, bias and mask, those that are not None, to y and 1 / rho.

    ``mask`` is the mask's steps to the next row and element.
    """
    launched = plan(call, scale, bias)
    x, gain, shift, mask_data = _buffers(OPERAND, True, scale, bias, mask)
    y, inverse_rms = _buffers(RESULT, True, True)
    steps = map(_number, mask or (0, 0))
    none = _number(0)
    sources = [x, _number(launched.x_bytes), none, gain, shift, mask_data, *steps, y, none, inverse_rms, none, none]
    key = kernel_key("forward", call, mask is not None, False, bias is not None)
    return _attribute(key, launched, launched.step(available()), sources)


def backward(
    call: Call, scale: str | None, bias: str | None, mask: tuple[int, int] | None, wanted: Sequence[bool],
    inverse_rms: bool = True, dh: bool = False,
) -> np.ndarray:  # fmt: skip
    """The same for the backward pass: from dy, h, 1 / rho, scale, mask and dh to dx, dscale and dbias.

    Each of 1 / rho, scale, mask and dh may be absent. ``wanted`` says which of the three results there are.
    """
    launched = plan(call, scale, bias)
    dy, h, factors, gain, mask_data, dh_data = _buffers(OPERAND, True, True, inverse_rms, scale, mask, dh)
    gradients = _buffers(RESULT, *wanted)
    steps = map(_number, mask or (0, 0))
    no_gate = [_number(0)] * 4
    sources = [h, _number(launched.x_bytes), gain, mask_data, *steps, factors, dy, dh_data, *gradients, *no_gate]
    key = kernel_key("backward", call, mask is not None, dh, bias is not None)
    return _attribute(key, launched, launched.chunk, sources)


def _buffers(kind: int, *present: object) -> list[tuple[int, int]]:
    """The sources of operands or results; 0 in place of those that are None or False."""
    indices = iter(range(len(present)))
    return [_number(0) if entry is None or entry is False else (kind, next(indices)) for entry in present]


def _number(value: int) -> tuple[int, int]:
    return NUMBER, value


def _attribute(key: machine_code.Key, launched: Plan, step: int, sources: list[tuple[int, int]]) -> np.ndarray:
    key.address()
    threads = available() if launched.rows * launched.n >= _PARALLEL else 1
    is_backward = machine_code.KINDS.index(key.kind)
    call = (key.place, is_backward, launched.rows, step, threads)
    return np.array([*call, *np.ravel(sources), *launched.settings.view(np.int64)])


@lru_cache(maxsize=1)
def handler() -> Callable[[int], int]:
    """The function that XLA calls."""
    load_tasks()
    table = machine_code.table
    table[SPREAD] = machine_code.address("xla_handler", "spread")
    table[NO_MEMORY], table[NO_KERNEL] = map(ctypes.addressof, (_no_memory, _no_kernel))
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(machine_code.address("xla_handler", "handle"))
