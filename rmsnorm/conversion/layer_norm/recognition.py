"""Layers that compute LayerNorm, whatever their class: recognised by what they compute."""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rmsnorm.accuracy.bounds import LAYER_NORM, LAYER_NORM_OF_FLOAT32, within
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.identify import Target, TargetError
from rmsnorm.identify.fit import nice
from rmsnorm.identify.layout import parameters
from rmsnorm.specification.variants import Variant

_LEADS: Final = ((3,), (2, 3), (2, 3, 4))

Array = npt.NDArray[Any]


def layer_norm(target: Target, x: str) -> Norm | None:
    """What takes the place of a layer after centred weights: its gain, bias and eps, without the mean.

    Args:
        target: the layer, or a copy of it.
        x: its name of x.

    Returns:
        None if it is no LayerNorm over the last axis, in training and in evaluation.
    """
    width, names = target.width or 16, target.names
    shapes = tuple((*lead, width) for lead in _LEADS)
    # A layer may compute in float32 whatever x is; then eps is known up to the roundings of that.
    for noise, bound in ((0.0, LAYER_NORM), (1e-6, LAYER_NORM_OF_FLOAT32)):
        variant = _solved(target, width, noise)
        if variant is not None and all(_agrees(target, variant, shape, bound) for shape in shapes):
            ranks = tuple(map(len, shapes))
            return Norm((-1,), (-1,), names.get("scale"), names.get("bias"), x, variant, (width,), ranks)
    return None


def _solved(target: Target, width: int, noise: float) -> Variant | None:
    """eps and the offset of the gain, if it is LayerNorm: from rows beside whose variance eps is large."""
    x = np.random.default_rng(0).normal(size=(3, width)) * 1e-12
    c = x - x.mean(-1, keepdims=True)
    try:
        zero, one = (_called(target, x, value) for value in (0.0, 1.0))
    except TargetError:
        return None
    slope = one - zero if "scale" in target.arguments else one
    with np.errstate(all="ignore"):
        offset = float(np.median(zero / slope)) if "scale" in target.arguments else 0.0
        eps = float(((c * c).sum() / (slope * c).sum()) ** 2 - np.median((c * c).mean(-1)))
    if not (math.isfinite(offset) and math.isfinite(eps)):
        return None
    eps = nice(eps, within(noise, 1e-7, 5e-3), 0.0) if eps > 1e-20 else 0.0
    return Variant(name="to_rms_norm", eps=eps, scale_offset=round(offset))


def _called(target: Target, x: Array, value: float) -> Array:
    """y with a gain of equal numbers and no bias."""
    arrays = parameters(target, x, scale=lambda shape: np.full(shape, value), bias=np.zeros)
    return target.forward(x, **arrays).astype(np.float64)


def _agrees(target: Target, variant: Variant, shape: tuple[int, ...], tolerance: float) -> bool:
    """Whether it is that LayerNorm for rows of any size, with random parameters."""
    random = np.random.default_rng(len(shape))
    x = random.normal(0.5, 1.0, shape) * 10.0 ** random.uniform(-4, 1, (*shape[:-1], 1))
    draw = functools.partial(random.normal, 0.5, 1.0)
    try:
        arrays = parameters(target, x, scale=draw, bias=draw)
    except TargetError:
        return False
    c = x - x.mean(-1, keepdims=True)
    want = c / np.sqrt((c * c).mean(-1, keepdims=True) + variant.eps_for("float64"))
    want = want * (variant.scale_offset + arrays.get("scale", 1.0 - variant.scale_offset)) + arrays.get("bias", 0.0)
    for mode in (True, False):
        try:
            with target.in_mode(mode):
                y = target.forward(x, **arrays)
        except TargetError:
            return False
        if not np.max(np.abs(y.astype(np.float64) - want)) <= tolerance * np.max(np.abs(want)):
            return False
    return True
