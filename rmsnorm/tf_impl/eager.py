"""Eager calls: by the kernels of rmsnorm.cpu if they support the call, else large ones by a function that XLA compiled.

XLA compiles once for every shape, which takes a tenth of a second, so that only large tensors gain by it. A function is
traced once for all sizes of the axes that are neither normalised nor those of the parameters. Graphs are in graph.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import tensorflow as tf

from rmsnorm import cpu, environment
from rmsnorm.call import Call, filled, given
from rmsnorm.tf_impl import arithmetic
from rmsnorm.tf_impl.private import is_recording, numbers
from rmsnorm.tf_impl.rounding import cast

_LARGE = 2**20  # elements: below, to compile another size takes as long as a hundred calls by operations


def forward(
    call: Call, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """As arithmetic.forward, of constants: a tape would keep every tensor, though no gradient goes through them."""
    if _has_kernels(call, h, scale, bias, mask):
        return _forward_kernel(call, h, scale, bias, _whole(call, mask))
    return _run(arithmetic.forward, call, _constants(h, scale, bias, mask))


def backward(
    call: Call,
    dy: tf.Tensor,
    h: tf.Tensor,
    scale: tf.Tensor | None,
    bias: tf.Tensor | None,
    mask: tf.Tensor | None,
    inverse_rms: tf.Tensor,
    dh: tf.Tensor | None = None,
) -> list[tf.Tensor | None]:
    """As rounded_backward, by the kernels unless a derivative of the result may be wanted: they have none."""
    if is_recording():
        return rounded_backward(call, dy, h, scale, bias, mask, inverse_rms, dh, recall=True)
    if _has_kernels(call, dy, h, scale, bias, mask, inverse_rms, dh):
        return _backward_kernel(call, dy, h, scale, bias, _whole(call, mask), inverse_rms, dh)
    tensors = _constants(dy, h, scale, bias, mask, inverse_rms, dh)
    results: list[tf.Tensor | None] = _run(rounded_backward, call, tensors)
    return results


def gradients(
    call: Call,
    dy: tf.Tensor,
    h: tf.Tensor,
    scale: tf.Tensor | None,
    bias: tf.Tensor | None,
    mask: tf.Tensor | None,
    dh: tf.Tensor | None,
) -> list[tf.Tensor | None] | None:
    """As backward, without a forward pass before; None if no kernel supports it and dy does not have the dtype of y."""
    if not _has_kernels(call, dy, h, scale, bias, mask, dh):
        if dy.dtype.name != call.result:
            return None
        _, inverse_rms = forward(call, h, scale, bias, mask)
        return backward(call, dy, h, scale, bias, mask, inverse_rms, dh)
    mask = _whole(call, mask)
    # the kernels compute 1 / rho again, but not for float64
    inverse_rms = _forward_kernel(call, h, None, None, mask)[1] if call.x == "float64" else None
    return _backward_kernel(replace(call, result=dy.dtype.name), dy, h, scale, bias, mask, inverse_rms, dh)


def rounded_backward(
    call: Call,
    dy: tf.Tensor,
    h: tf.Tensor,
    scale: tf.Tensor | None,
    bias: tf.Tensor | None,
    mask: tf.Tensor | None,
    inverse_rms: tf.Tensor,
    dh: tf.Tensor | None = None,
    *,
    recall: bool = False,
) -> list[tf.Tensor | None]:
    """dx + dh, dscale and dbias in the dtypes of h, scale and bias; None for a parameter that is None.

    For a derivative of them 1 / rho is recalled if it is a constant: in a graph of operations it has its own.
    """
    x = arithmetic.wide(call, h)
    if recall:
        inverse_rms = arithmetic.recalled(call, x, mask, inverse_rms)
    dx, dscale, dbias = arithmetic.backward(call, dy, x, scale, mask, inverse_rms)
    if dh is not None:
        dx = tf.cast(dx, tf.float64) + tf.cast(dh, tf.float64)
    pairs = zip((dx, dscale, dbias), (h, scale, bias), strict=True)
    return [None if primal is None else cast(result, primal.dtype.name) for result, primal in pairs]


def uses_xla() -> bool:
    """Whether the calls that XLA is faster for may be compiled by it, also where the program does not ask for it."""
    return environment.read("RMSNORM_XLA") != "0"


def _constants(*tensors: tf.Tensor | None) -> list[tf.Tensor | None]:
    """The tensors as constants, which no tape records."""
    return [None if t is None else tf.stop_gradient(t) for t in tensors]


def _whole(call: Call, mask: tf.Tensor | None) -> tf.Tensor | None:
    """The mask in the shape of x, as kernels read it."""
    return None if mask is None else tf.broadcast_to(mask, call.shape)


def _run(function: Callable[..., Any], call: Call, tensors: Sequence[tf.Tensor | None]) -> Any:
    """The function, compiled for large tensors."""
    if math.prod(call.shape) < _LARGE or not uses_xla():
        return function(call, *tensors)
    return compiled(function, *signature(call, tensors))(*given(tensors))


def signature(call: Call, tensors: Sequence[tf.Tensor | None]) -> tuple[Call, tuple[tf.TensorSpec | None, ...]]:
    """The call and the tensors for all sizes of the axes that are neither normalised nor those of the parameters."""
    fixed = {*call.axes, *call.feature_axes}
    shape = tuple(size if axis in fixed else None for axis, size in enumerate(call.shape))
    specs = tuple(
        None
        if t is None
        else tf.TensorSpec([s if r else None for s, r in zip(t.shape, shape, strict=True)], t.dtype)
        if t.shape.rank == len(shape)
        else tf.TensorSpec(t.shape, t.dtype)
        for t in tensors
    )
    return replace(call, shape=shape), specs


@lru_cache(maxsize=128)
def compiled(function: Callable[..., Any], call: Call, specs: tuple[tf.TensorSpec | None, ...]) -> Any:
    def run(*tensors: tf.Tensor) -> Any:
        return function(call, *filled(tensors, specs))

    return tf.function(run, input_signature=given(specs), jit_compile=True, autograph=False)


def _has_kernels(call: Call, *tensors: tf.Tensor | None) -> bool:
    return numbers is not None and cpu.supports(call) and all(t is None or t.device.endswith("CPU:0") for t in tensors)


def _forward_kernel(
    call: Call, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    from rmsnorm.cpu import launch, threads

    plan = launch.plan(call, _name(scale), _name(bias))
    y, inverse_rms = _empty((call.shape, call.result), (plan.reduced, "float64"))
    plan.run_forward(
        threads.own_threads, _address(h), plan.x_bytes, 0, _address(scale), _address(bias), *_mask(plan.n, mask),
        _address(y), 0, _address(inverse_rms), 0, 0,
    )  # fmt: skip
    return y, inverse_rms


def _backward_kernel(
    call: Call,
    dy: tf.Tensor,
    h: tf.Tensor,
    scale: tf.Tensor | None,
    bias: tf.Tensor | None,
    mask: tf.Tensor | None,
    inverse_rms: tf.Tensor | None,
    dh: tf.Tensor | None = None,
) -> list[tf.Tensor | None]:
    from rmsnorm.cpu import launch, threads

    plan = launch.plan(call, _name(scale), _name(bias))
    primals = (h, scale, bias)
    results = filled(_empty(*((tuple(t.shape), t.dtype.name) for t in given(primals))), primals)
    plan.run_backward(
        threads.own_threads, _address(h), plan.x_bytes, _address(scale), *_mask(plan.n, mask),
        _address(inverse_rms), _address(dy), _address(dh), *map(_address, results), 0, 0, 0, 0,
    )  # fmt: skip
    return results


def _empty(*specs: tuple[Sequence[int], str]) -> list[tf.Tensor]:
    """New tensors for a kernel to fill, in memory of TensorFlow, which aborts on memory not aligned to 64 bytes."""
    with tf.device("CPU:0"):
        # TensorFlow's fast path knows no names of dtypes
        pairs = [(_sizes(shape), tf.as_dtype(dtype)) for shape, dtype in specs]
        return [tf.raw_ops.Empty(shape=sizes, dtype=dtype, init=False) for sizes, dtype in pairs]


@lru_cache(maxsize=1024)
def _sizes(shape: tuple[int, ...]) -> tf.Tensor:
    """As a tensor, which takes longer to make than one of that shape."""
    return tf.constant(shape, tf.int32)


def _address(tensor: tf.Tensor | None) -> int:
    return 0 if tensor is None or numbers is None else int(numbers(tensor).__array_interface__["data"][0])


def _mask(n: int, mask: tf.Tensor | None) -> tuple[int, int, int]:
    """The mask's address, and its steps to the next row and element."""
    return (0, 0, 0) if mask is None else (_address(mask), n, 1)


def _name(x: tf.Tensor | None) -> str | None:
    return None if x is None else str(x.dtype.name)
