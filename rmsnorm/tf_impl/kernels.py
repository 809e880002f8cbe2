"""The door to the kernels: forward and backward of tensors on one CPU, in eager calls."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import tensorflow as tf

from rmsnorm.cpu.prepared import Prepared, back
from rmsnorm.cpu.threads import own_threads
from rmsnorm.specification.call import filled, without_none
from rmsnorm.tf_impl.private import numbers


def are_readable(tensors: Iterable[tf.Tensor | None]) -> bool:
    """Whether kernels can read the numbers of all tensors."""
    return numbers is not None and all(t is None or t.device.endswith("CPU:0") for t in tensors)


def forward(
    prepared: Prepared, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None,
    gate: tf.Tensor | None, with_inverse_rms: bool,
) -> tuple[tf.Tensor, tf.Tensor | None]:  # fmt: skip
    """y, and 1 / rho in float64 if it is asked for."""
    (plan, _), call = prepared.in_memory(), prepared.rows
    h, mask, gate = _permuted(prepared.order, h, _whole(prepared, mask), gate)
    y, *others = _empty((call.shape, call.result), *([(plan.reduced, "float64")] if with_inverse_rms else []))
    inverse_rms = others[0] if others else None
    plan.run_forward(
        own_threads, _array(h), plan.x_bytes, None, _array(scale), _array(bias), *_mask(plan.n, mask),
        _array(y), None, _array(inverse_rms), _array(gate), _step(plan.n, gate),
    )  # fmt: skip
    y, inverse_rms = _permuted(_back(prepared.order), y, inverse_rms)
    return y, inverse_rms


def backward(
    prepared: Prepared, dy: tf.Tensor, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None,
    mask: tf.Tensor | None, gate: tf.Tensor | None, inverse_rms: tf.Tensor | None, dh: tf.Tensor | None,
) -> list[tf.Tensor | None]:  # fmt: skip
    """dx + dh, dscale, dbias and dgate, each in the dtype of its primal; without 1 / rho it is computed once more."""
    plan, _ = prepared.in_memory()
    dy, h, mask, inverse_rms, dh, gate = _permuted(prepared.order, dy, h, _whole(prepared, mask), inverse_rms, dh, gate)
    primals = (h, scale, bias, gate)
    results = filled(_empty(*((tuple(t.shape), t.dtype.name) for t in without_none(primals))), primals)
    dx, dscale, dbias, dgate = results
    plan.run_backward(
        own_threads, _array(h), plan.x_bytes, _array(scale), *_mask(plan.n, mask), _array(inverse_rms), _array(dy),
        _array(dh), _array(dx), _array(dscale), _array(dbias), _array(gate), _step(plan.n, gate), _array(dgate),
        None if gate is None else _array(bias),
    )  # fmt: skip
    dx, dgate = _permuted(_back(prepared.order), dx, dgate)
    return [dx, dscale, dbias, dgate]


def _permuted(order: tuple[int, ...] | None, *tensors: tf.Tensor | None) -> Any:
    """The tensors, each shaped as x but for sizes of 1, with their axes in that order; None is the one they have."""
    return tensors if order is None else [None if t is None else tf.transpose(t, order) for t in tensors]


def _back(order: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if order is None else back(order)


def _whole(prepared: Prepared, mask: tf.Tensor | None) -> tf.Tensor | None:
    """The mask in the shape of x, as kernels read it."""
    return None if mask is None else tf.broadcast_to(mask, prepared.call.shape)


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


def _mask(n: int, mask: tf.Tensor | None) -> tuple[Any, int, int]:
    """The mask, and its steps to the next row and element."""
    return (None, 0, 0) if mask is None else (_array(mask), n, 1)
