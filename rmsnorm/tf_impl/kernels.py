"""The door to the kernels: forward and backward of tensors on one CPU, in eager calls."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import tensorflow as tf

from rmsnorm.cpu.prepared import Prepared
from rmsnorm.cpu.rows import mask_steps, moved, moved_back, with_all_axes
from rmsnorm.cpu.threads import own_threads
from rmsnorm.specification.absent import filled, without_none
from rmsnorm.specification.call import Call
from rmsnorm.tf_impl.private import numbers


def are_readable(tensors: Iterable[tf.Tensor | None]) -> bool:
    """Whether kernels can read the numbers of all tensors."""
    return numbers is not None and all(t is None or t.device.endswith("CPU:0") for t in tensors)


def forward(
    prepared: Prepared, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None,
    gate: tf.Tensor | None, with_inverse_rms: bool,
) -> tuple[tf.Tensor, tf.Tensor | None]:  # fmt: skip
    """y, and 1 / rho in float64 if it is asked for."""
    (launch, _), call = prepared.in_memory(), prepared.rows
    h, mask, gate = moved(prepared.order, _transposed, h, mask, gate)
    y, *others = _empty((call.shape, call.result), *([(launch.reduced, "float64")] if with_inverse_rms else []))
    inverse_rms = others[0] if others else None
    mask, mask_step, mask_stride = _mask(call, mask)
    threads, gomp_parallel = launch.forward_threads(own_threads)
    launch.native.forward(
        threads=threads, gomp_parallel=gomp_parallel, x=_array(h), x_step=launch.row_bytes, residual=None,
        scale=_array(scale), bias=_array(bias), mask=mask, mask_step=mask_step, mask_stride=mask_stride, y=_array(y),
        h=None, inverse_rms=_array(inverse_rms), gate=_array(gate), gate_step=_step(launch.n, gate),
    )  # fmt: skip
    y, inverse_rms = moved_back(prepared.order, tf.transpose, y, inverse_rms)
    return y, inverse_rms


def backward(
    prepared: Prepared, dy: tf.Tensor, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None,
    mask: tf.Tensor | None, gate: tf.Tensor | None, inverse_rms: tf.Tensor | None, dh: tf.Tensor | None,
) -> list[tf.Tensor | None]:  # fmt: skip
    """dx + dh, dscale, dbias and dgate, each in the dtype of its primal; without 1 / rho it is computed once more."""
    (launch, _), call = prepared.in_memory(), prepared.rows
    dy, h, mask, inverse_rms, dh, gate = moved(prepared.order, _transposed, dy, h, mask, inverse_rms, dh, gate)
    primals = (h, scale, bias, gate)
    results = filled(_empty(*((tuple(t.shape), t.dtype.name) for t in without_none(primals))), primals)
    dx, dscale, dbias, dgate = results
    mask, mask_step, mask_stride = _mask(call, mask)
    threads, gomp_parallel = launch.backward_threads(own_threads)
    launch.native.backward(
        threads=threads, gomp_parallel=gomp_parallel, h=_array(h), h_step=launch.row_bytes, scale=_array(scale),
        mask=mask, mask_step=mask_step, mask_stride=mask_stride, inverse_rms=_array(inverse_rms), dy=_array(dy),
        dh=_array(dh), dx=_array(dx), dscale=_array(dscale), dbias=_array(dbias), gate=_array(gate),
        gate_step=_step(launch.n, gate), dgate=_array(dgate), bias=None if gate is None else _array(bias),
    )  # fmt: skip
    dx, dgate = moved_back(prepared.order, tf.transpose, dx, dgate)
    return [dx, dscale, dbias, dgate]


def _transposed(tensor: tf.Tensor, order: tuple[int, ...]) -> tf.Tensor:
    return tf.transpose(tf.reshape(tensor, with_all_axes(tensor.shape, len(order))), order)


def _step(n: int, gate: tf.Tensor | None) -> int:
    """The bytes from a row of the gate to the next."""
    return 0 if gate is None else n * gate.dtype.size


def _empty(*specs: tuple[tuple[int, ...], str]) -> list[tf.Tensor]:
    """New tensors for a kernel to fill, in memory of TensorFlow, which aborts on memory not aligned to 64 bytes."""
    with tf.device("CPU:0"):
        return [tf.raw_ops.Empty(shape=_sizes(shape), dtype=_dtype(dtype), init=False) for shape, dtype in specs]


@lru_cache(maxsize=1024)
def _sizes(shape: tuple[int, ...]) -> tf.Tensor:
    """As a tensor, which takes longer to make than one of that shape."""
    return tf.constant(shape, tf.int32)


_dtype: Final = lru_cache(maxsize=32)(tf.as_dtype)  # TensorFlow's fast path knows no names of dtypes


def _array(tensor: tf.Tensor | None) -> Any:
    """The numbers of a tensor as an array that shares its memory."""
    return None if tensor is None or numbers is None else numbers(tensor)


def _mask(call: Call, mask: tf.Tensor | None) -> tuple[Any, int, int]:
    """The mask without gaps, and its steps to the next row and element."""
    if mask is None:
        return None, 0, 0
    shape, row_step, step = mask_steps(tuple(mask.shape), call.shape, call.first_of_row)
    return _array(tf.broadcast_to(mask, shape)), row_step, step
