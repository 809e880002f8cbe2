"""The kernels on NumPy arrays. An array that is not laid out in rows is copied; results are new arrays."""

from __future__ import annotations

from typing import Any, TypeAlias

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

from rmsnorm.cpu.prepared import Prepared
from rmsnorm.cpu.rows import moved, moved_back, with_all_axes
from rmsnorm.cpu.threads import own_threads

Array: TypeAlias = np.ndarray


def forward(
    prepared: Prepared, x: Array, scale: Array | None, bias: Array | None, mask: Array | None,
    residual: Array | None, gate: Array | None, with_inverse_rms: bool,
) -> tuple[Array, Array | None, Array | None]:  # fmt: skip
    """y, h = x + residual (None without one), and 1 / rho in float64 if asked for. No kernel takes a mask or a gate."""
    _check_absent(mask, gate)
    (launch, _), order, call = prepared.in_memory(), prepared.order, prepared.rows
    x, residual = moved(order, _transposed, x, residual)
    h = None
    if residual is not None:
        x, residual = x.astype(call.x, copy=False), np.ascontiguousarray(residual, call.x)
        h = np.empty(call.shape, call.x)
    y = np.empty(call.shape, call.result)
    inverse_rms = np.empty(launch.reduced) if with_inverse_rms else None
    x, x_step = _rows(launch.n, x)
    threads, gomp_parallel = launch.forward_threads(own_threads)
    launch.native.forward(
        threads=threads, gomp_parallel=gomp_parallel, x=x, x_step=x_step, residual=residual, scale=_native(scale),
        bias=_native(bias), y=y, h=h, inverse_rms=inverse_rms,
    )  # fmt: skip
    y, h, inverse_rms = moved_back(order, _transposed_copy, y, h, inverse_rms)
    return y, h, inverse_rms


def backward(
    prepared: Prepared, dy: Array, h: Array, scale: Array | None, bias: Array | None, mask: Array | None,
    dh: Array | None, gate: Array | None,
) -> tuple[Array, Array | None, Array | None, None]:  # fmt: skip
    """dx + dh, dscale, dbias and None, each in the dtype of its argument. dh has the dtype of h."""
    _check_absent(mask, gate)
    (launch, _), order, call = prepared.in_memory(), prepared.order, prepared.rows
    dy, h, dh = moved(order, _transposed, dy, h, dh)
    dx = np.empty(call.shape, call.x)
    scale, bias = _native(scale), _native(bias)
    dscale, dbias = (None if primal is None else np.empty(primal.shape, primal.dtype) for primal in (scale, bias))
    h, h_step = _rows(launch.n, h)
    dh = None if dh is None else np.ascontiguousarray(dh, dtype=call.x)
    threads, gomp_parallel = launch.backward_threads(own_threads)
    launch.native.backward(
        threads=threads, gomp_parallel=gomp_parallel, h=h, h_step=h_step, scale=scale, inverse_rms=None, dy=_native(dy),
        dh=dh, dx=dx, dscale=dscale, dbias=dbias,
    )  # fmt: skip
    (dx,) = moved_back(order, _transposed_copy, dx)
    return dx, dscale, dbias, None


def _check_absent(mask: Array | None, gate: Array | None) -> None:
    if mask is not None or gate is not None:
        raise ValueError("the kernels take no mask and no gate")


def _transposed(array: Array, order: tuple[int, ...]) -> Array:
    return array.reshape(with_all_axes(array.shape, len(order))).transpose(order)


def _transposed_copy(array: Array, order: tuple[int, ...]) -> Array:
    return np.ascontiguousarray(array.transpose(order))


def _native(array: Array | None) -> Any:
    """The array without gaps, in the byte order of this machine."""
    if array is None or (array.flags.c_contiguous and array.dtype.isnative):
        return array
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))


def _rows(n: int, x: Any) -> tuple[Any, int]:
    """A matrix of rows of n, each without a gap, and the bytes from one to the next: x, a view of it, or a copy."""
    if not x.flags.c_contiguous or not x.dtype.isnative:
        x = x.reshape(-1, n)
        if (x.strides[1] == x.itemsize or n == 1) and x.dtype.isnative:
            return x, x.strides[0]
        x = np.ascontiguousarray(x, x.dtype.newbyteorder("="))
    return x, n * x.itemsize
