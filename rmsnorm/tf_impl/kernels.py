"""The door to the kernels: forward and backward of tensors on one CPU, in eager calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

import tensorflow as tf

from rmsnorm.cpu.threads import own_threads
from rmsnorm.engines import Prepared
from rmsnorm.recipe import narrowed
from rmsnorm.specification.absent import filled, without_none
from rmsnorm.tf_impl.private import numbers
from rmsnorm.tf_impl.space import OPS


def why_not(prepared: Prepared, tensors: Sequence[tf.Tensor | None]) -> str | None:
    """Why no kernel computes a call with these tensors; None if one does.

    They are x, scale, bias, mask, residual, gate, and in any order others, each a tensor or None.
    """
    if not tf.executing_eagerly():
        return "a graph is computed by operations"
    if not are_readable(tensors):
        return "an array is not in the memory of a CPU as it is"
    call, x, residual = prepared.call, tensors[0], tensors[4]
    if residual is not None and not call.is_gated_before:
        if call.exact_sum:
            return "x + residual is normalised before it is rounded"
        if x is not None and x.dtype != residual.dtype:
            return "x and residual have different dtypes"
    reason: str | None = prepared.in_memory()[1]
    return reason


def are_readable(tensors: Iterable[tf.Tensor | None]) -> bool:
    """Whether kernels can read the numbers of all tensors."""
    return numbers is not None and all(t is None or t.device.endswith("CPU:0") for t in tensors)


def forward(
    prepared: Prepared, x: tf.Tensor, residual: tf.Tensor | None, scale: tf.Tensor | None, bias: tf.Tensor | None,
    with_inverse_rms: bool,
) -> tuple[tf.Tensor, tf.Tensor | None, tf.Tensor | None]:  # fmt: skip
    """y, x + residual and, if it is asked for, 1 / rho in float64."""
    (launch, _), call = prepared.in_memory(), prepared.kernel_call
    scale = narrowed(OPS, call, scale)
    y = _empty(call.shape, call.result_dtype)
    h = None if residual is None else _empty(call.shape, call.sum_dtype)
    inverse_rms = _empty(launch.reduced, "float64") if with_inverse_rms else None
    threads, gomp_parallel = launch.forward_threads(own_threads)
    launch.native.forward(
        threads=threads, gomp_parallel=gomp_parallel, x=_array(x), x_step=launch.row_bytes, residual=_array(residual),
        scale=_array(scale), bias=_array(bias), y=_array(y), h=_array(h), inverse_rms=_array(inverse_rms),
    )  # fmt: skip
    return y, h, inverse_rms


def backward(
    prepared: Prepared, dy: tf.Tensor, dh: tf.Tensor | None, h: tf.Tensor, scale: tf.Tensor | None,
    bias: tf.Tensor | None, inverse_rms: tf.Tensor | None,
) -> list[tf.Tensor | None]:  # fmt: skip
    """dx + dh, dscale and dbias, each in the dtype of its tensor; without 1 / rho it is computed once more."""
    launch, _ = prepared.in_memory()
    primals = (h, scale, bias)
    results = filled([_empty(tuple(t.shape), t.dtype.name) for t in without_none(primals)], primals)
    dx, dscale, dbias = results
    scale = narrowed(OPS, prepared.kernel_call, scale)
    threads, gomp_parallel = launch.backward_threads(own_threads)
    launch.native.backward(
        threads=threads, gomp_parallel=gomp_parallel, h=_array(h), h_step=launch.row_bytes, scale=_array(scale),
        inverse_rms=_array(inverse_rms), dy=_array(dy), dh=_array(dh), dx=_array(dx), dscale=_array(dscale),
        dbias=_array(dbias),
    )  # fmt: skip
    return results


def _empty(shape: tuple[int, ...], dtype: str) -> tf.Tensor:
    """A new tensor for a kernel to fill, in memory of TensorFlow, which aborts on memory not aligned to 64 bytes."""
    with tf.device("CPU:0"):
        return tf.raw_ops.Empty(shape=_sizes(shape), dtype=_dtype(dtype), init=False)


@lru_cache(maxsize=1024)
def _sizes(shape: tuple[int, ...]) -> tf.Tensor:
    """As a tensor, which takes longer to make than one of that shape."""
    return tf.constant(shape, tf.int32)


_dtype: Final = lru_cache(maxsize=32)(tf.as_dtype)  # TensorFlow's fast path knows no names of dtypes


def _array(tensor: tf.Tensor | None) -> Any:
    """The numbers of a tensor as an array that shares its memory."""
    return None if tensor is None or numbers is None else numbers(tensor)
