"""Eager calls that no kernel computes: large ones by a function that XLA compiled.

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

from rmsnorm import environment
from rmsnorm.call import Call, filled, given
from rmsnorm.tf_impl import arithmetic
from rmsnorm.tf_impl.private import is_recording
from rmsnorm.tf_impl.rounding import cast

_LARGE = 2**20  # elements: below, to compile another size takes as long as a hundred calls by operations


def forward(
    call: Call, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """As arithmetic.forward, of constants: a tape would keep every tensor, though no gradient goes through them."""
    y, inverse_rms = _run(arithmetic.forward, call, _constants(h, scale, bias, mask))
    return y, inverse_rms


def backward(call: Call, *tensors: tf.Tensor | None) -> list[tf.Tensor | None]:
    """As rounded_backward, of constants unless a derivative of the result may be wanted."""
    if is_recording():
        return rounded_backward(call, *tensors, recall=True)
    results: list[tf.Tensor | None] = _run(rounded_backward, call, _constants(*tensors))
    return results


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
