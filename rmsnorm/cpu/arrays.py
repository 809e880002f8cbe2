"""The kernels on NumPy arrays. An array that is not laid out in rows is copied; results are new arrays."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeAlias

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

from rmsnorm.call import Call
from rmsnorm.cpu import launch
from rmsnorm.cpu.launch import address
from rmsnorm.cpu.threads import own_threads

Array: TypeAlias = np.ndarray


def forward(
    call: Call,
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    residual: Array | None = None,
    gate: Array | None = None,
    *,
    with_inverse_rms: bool = True,
) -> tuple[Array, Array | None, Array | None]:
    """y, h = x + residual (None without one), and 1 / rho in float64 if asked for, of a call that is supported."""
    if residual is not None:
        x, residual = x.astype(call.x, copy=False), residual.astype(call.x, copy=False)
    plan = launch.plan(call, _name(scale), _name(bias), _name(gate))
    scale, bias, x = _native(scale), _native(bias), _rows(plan.n, x)
    y = np.empty(call.shape, call.result)
    h = None if residual is None else np.empty(call.shape, call.x)
    inverse_rms = np.empty(plan.reduced) if with_inverse_rms else None
    residual = None if residual is None else np.ascontiguousarray(residual)
    _owner, mask_arguments = _masked(call, plan.n, mask)
    gate, gate_step = _gates(plan.n, gate)
    plan.run_forward(
        own_threads, address(x), x.strides[0], address(residual), address(scale), address(bias), *mask_arguments,
        address(y), address(h), address(inverse_rms), address(gate), gate_step,
    )  # fmt: skip
    return y, h, inverse_rms


def backward(
    call: Call,
    dy: Array,
    h: Array,
    scale: Array | None,
    bias: Array | None,
    mask: Array | None,
    dh: Array | None = None,
    gate: Array | None = None,
) -> tuple[Array, Array | None, Array | None, Array | None]:
    """dx + dh, dscale, dbias and dgate, each in the dtype of its argument."""
    if _name(dy) != call.result:
        call = replace(call, result=_named(dy.dtype))
    plan = launch.plan(call, _name(scale), _name(bias), _name(gate))
    dgate = None if gate is None else np.empty(call.shape, gate.dtype.newbyteorder("="))
    scale, bias, h, (gate, gate_step) = _native(scale), _native(bias), _rows(plan.n, h), _gates(plan.n, gate)
    dy = np.ascontiguousarray(_native(dy))
    dh = None if dh is None else np.ascontiguousarray(dh, dtype=call.x)
    dx = np.empty(call.shape, call.x)
    dscale, dbias = (None if primal is None else np.empty(primal.shape, primal.dtype) for primal in (scale, bias))
    _owner, mask_arguments = _masked(call, plan.n, mask)
    plan.run_backward(
        own_threads, address(h), h.strides[0], address(scale), *mask_arguments, 0, address(dy), address(dh),
        address(dx), address(dscale), address(dbias), address(gate), gate_step, address(dgate),
        0 if gate is None else address(bias),
    )  # fmt: skip
    return dx, dscale, dbias, dgate


def _native(array: Array | None) -> Any:
    return array if array is None else np.ascontiguousarray(array, array.dtype.newbyteorder("="))


def _rows(n: int, x: Array) -> Array:
    """A matrix of rows of n, each without a gap: a view of x if that is possible, else a copy."""
    matrix = x.reshape(-1, n)
    if (matrix.strides[1] != matrix.itemsize and n > 1) or not matrix.dtype.isnative:
        return np.ascontiguousarray(matrix, matrix.dtype.newbyteorder("="))
    return matrix


def _gates(n: int, gate: Array | None) -> tuple[Array | None, int]:
    """The gate in rows of n, and the bytes from one to the next."""
    if gate is None:
        return None, 0
    matrix = _rows(n, gate)
    return matrix, matrix.strides[0]


def _masked(call: Call, n: int, mask: Array | None) -> tuple[Array | None, tuple[int, int, int]]:
    """The mask in rows, which the caller keeps alive; its address, and the steps to the next row and element."""
    if mask is None:
        return None, (0, 0, 0)
    matrix = np.broadcast_to(mask, call.shape).reshape(-1, n)
    if matrix.strides[1] < 0:  # a negative step would mean that there is no mask
        matrix = matrix.copy()
    return matrix, (address(matrix), matrix.strides[0], matrix.strides[1])


def _name(array: Array | None) -> str | None:
    return None if array is None else _named(array.dtype)


@lru_cache
def _named(dtype: np.dtype) -> str:
    """The name of a dtype. NumPy makes it anew each time, which takes longer than a row."""
    return dtype.name
