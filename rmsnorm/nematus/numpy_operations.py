"""The operations of models/operations.py in NumPy, in the dtype of the arguments.

The norm is a few lines and not the double-double golden, which takes a thousand times as long. Nothing is ever dropped
out, because there are no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial as bind
from operator import getitem
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from rmsnorm.nematus.models.operations import looped
from rmsnorm.specification.variants import Variant

Array: TypeAlias = npt.NDArray[Any]

cached: Final = None
attention: Final = None

tanh, shape, rows, where, matmul = np.tanh, np.shape, getitem, np.where, np.matmul
concatenated, repeated, sum, reshape = np.concatenate, np.repeat, np.sum, np.reshape
split, relu = bind(np.split, axis=-1), bind(np.maximum, 0)
transposed, swapped = np.matrix_transpose, bind(np.swapaxes, axis1=1, axis2=2)
to_host = np.asarray
scan = bind(looped, np.stack)


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x), computed as (1 + tanh(x / 2)) / 2, which does not overflow."""
    return (1 + np.tanh(x / 2)) / 2


def softmax(x: Array, axis: int) -> Array:
    weights: Array = np.exp(x - x.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


def logsumexp(x: Array, axis: int) -> Array:
    largest = x.max(axis, keepdims=True)
    result: Array = largest + np.log(np.exp(x - largest).sum(axis, keepdims=True))
    return result.squeeze(axis)


def log_softmax(x: Array) -> Array:
    return x - logsumexp(x, -1)[..., None]


def rms_norm(x: Array, gain: Array, offset: Array | None, *, eps: float, partial: float | None) -> Array:
    counted = x[..., : Variant.get("nematus").replace(partial=partial).counted(x.shape[-1])]
    y: Array = x / np.sqrt(np.mean(counted**2, -1, keepdims=True) + np.asarray(eps, x.dtype)) * gain
    return y if offset is None else y + offset


def layer_norm(x: Array, gain: Array, offset: Array | None, eps: float) -> Array:
    return rms_norm(x - x.mean(-1, keepdims=True), gain, offset, eps=eps, partial=None)


def cast(x: Any, like: Array) -> Array:
    return np.asarray(x, like.dtype)


def filled(shape: Sequence[int], value: float, like: Array) -> Array:
    return np.full(shape, value, like.dtype)


def take(table: Array, ids: Array) -> Array:
    return table[np.maximum(ids, 0)]


def picked(x: Array, ids: Array) -> Array:
    return np.take_along_axis(x, ids[..., None], -1)[..., 0]


def positions(start: int, count: int, length: int, size: int, like: Array) -> Array:
    half = size // 2
    angles = np.outer(start + np.arange(count), np.exp(-np.arange(half) * np.log(10000) / (half - 1)))
    odd = np.zeros((count, size % 2))
    return np.concatenate((np.sin(angles), np.cos(angles), odd), axis=1).astype(like.dtype)


def future(start: int, count: int, length: int, score: float, like: Array) -> Array:
    is_future = np.arange(length) > start + np.arange(count)[:, None]
    return np.where(is_future, score, 0.0).astype(like.dtype)


def checked(check: Callable[..., Any], ids: Any, mask: Any) -> Any:
    return check(ids, mask)


def as_ids(ids: Any, like: Array) -> Array:
    return np.asarray(ids)
