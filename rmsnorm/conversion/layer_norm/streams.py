"""Finds the parameters that must be centred, and which ones can be, from numbers: no graph of the model is read.

P = I - 11'/n subtracts the mean over n features. LayerNorm(v) = LayerNorm(P v) = RMSNorm(P v), with the same gain, bias
and eps. A value v can be replaced by P v if that is right for the operation that makes it and for all that read it:

    The operation that makes v is linear in a weight or in other values:
        P (x W + b) = x (W P) + P b,   P (v + c) = P v + P c,   P (v s) = (P v) s for a factor s that all features share
    An operation that reads v does not see the mean, LayerNorm(P v) = LayerNorm(v),
    or it passes the mean on, so that its own result z becomes P z.

So values that are connected by sums, factors and moves are centred together or not at all. They form a stream, for
example the residual stream of a Transformer. A stream is centred if every path backwards ends in a parameter and every
path forwards ends in a LayerNorm. It is not centred if it meets the model's input or output, a nonlinearity, a matrix
that reads it, or a parameter that is used elsewhere.

A LayerNorm can also write to a stream: where norms follow the sums, as in BERT. With x^ for the normalised input, the
mean of its output diag(g) x^ + b is g'x^/n + mean(b). No weight can remove that, except when all gains are equal: then
g'x^ = 0 and only b must be centred. If b has mean zero already, the output does not change, and other readers do not
matter.

One property of the whole function decides all of this. Shifting a parameter along an axis by the same number changes no
output, whatever the parameters are, if and only if the sum of the outputs' gradient along that axis is 0. At random
parameters, for a random linear functional of all outputs, a sum that is 0 by accident is improbable. So one backward
pass finds every parameter that can be centred, and all of them can be centred together. A LayerNorm that then reads
a mean of 0 is an RMSNorm. The random parameters keep what the norms rely on: a gain whose elements are equal stays
one number, and a bias without a mean has none.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Axes = tuple[int, ...]
Shift = tuple[str, Axes]  # a parameter, and the axes along which the same number is added


def drawn(name: str, value: Array, *, scalar: bool = False, centred: bool = False) -> Array:
    """Random numbers in place of a parameter or an input: of its signs and its size, and none where it is all 0.

    Args:
        name: seeds the numbers.
        scalar: whether all its elements get the same factor.
        centred: whether its mean stays 0.
    """
    random = np.random.default_rng(zlib.crc32(name.encode()))
    size = np.sqrt(np.mean(np.square(value))) if value.size else 0.0
    zeros = np.zeros(value.shape) if scalar or size else 0.1 * random.normal(size=value.shape)
    result = value * random.uniform(0.5, 1.0, () if scalar else value.shape) + zeros
    return (result - result.mean() if centred else result).astype(value.dtype)


def is_centred(value: Array) -> bool:
    """Whether its mean is 0, up to the roundings of its elements in float32."""
    return bool(abs(value.mean()) <= 2.0**-24 * np.abs(value).max(initial=0.0))


def shifts_of(gradients: Mapping[str, Array | None], sizes: Collection[int], bound: float) -> Iterator[Shift]:
    """Along which axes, of as many elements as a LayerNorm has, shifting a parameter changes no output."""
    for name, gradient in gradients.items():
        if gradient is not None and gradient.any():
            choices = axes_of(gradient.shape, sizes)
            yield from ((name, axes) for axes in choices if not moves(gradient, axes, bound))


def axes_of(shape: Sequence[int], sizes: Collection[int]) -> Iterator[Axes]:
    """The axes that have one of these numbers of elements together."""
    wide = [axis for axis, size in enumerate(shape) if size > 1]
    every = (axes for count in range(1, len(wide) + 1) for axes in combinations(wide, count))
    return (axes for axes in every if math.prod(shape[axis] for axis in axes) in sizes)


def moves(gradient: Array | None, axes: Axes, bound: float) -> bool:
    """Whether shifting along these axes changes the functional that has this gradient."""
    if gradient is None:
        return False
    total, terms = np.abs(gradient.sum(axes)), np.abs(gradient).sum(axes)
    return not total.max() <= bound * terms.max()  # NaN moves


def centred(value: Array, axes: Iterable[Axes]) -> Array:
    """A parameter without its mean along each of these axes."""
    for each in axes:
        value = value - value.mean(each, dtype=np.float64, keepdims=True).astype(value.dtype)
    return value


def by_halves(shifts: Sequence[Any], fit: Callable[[Sequence[Any]], bool]) -> list[Any]:
    """Those that fit, where the ones of a part fit together if each of them does."""
    if not shifts or fit(shifts):
        return list(shifts)
    half = len(shifts) // 2
    return [] if half == 0 else [*by_halves(shifts[:half], fit), *by_halves(shifts[half:], fit)]
