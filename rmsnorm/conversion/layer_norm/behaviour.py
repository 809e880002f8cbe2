"""Layers that compute LayerNorm, whatever their class: recognised by what they compute, in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rmsnorm.accuracy.bounds import LAYER_NORM, LAYER_NORM_OF_FLOAT32
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.report import Unproven
from rmsnorm.identify import Target, TargetError
from rmsnorm.identify.layout import parameters
from rmsnorm.identify.readings import nice
from rmsnorm.specification.variants import Variant

_NARROW: Final = "it computes LayerNorm in less than float64, where nothing shows that its replacement is exact"
_LEADS: Final = ((3,), (2, 3), (2, 3, 4))

Array = npt.NDArray[Any]


def layer_norm(target: Target, x: str) -> Norm | None:
    """What takes the place of a layer after centred weights: its gain, bias and eps, without the mean.

    Args:
        target: the layer, or a copy of it.
        x: its name of x.

    Returns:
        None if it is no LayerNorm over the last axis, in training and in evaluation.

    Raises:
        Unproven: it is one, but not in float64 for float64 x.
    """
    width = target.width or 16
    variant = _solved(target, width)
    if variant is None:
        return None
    shapes = [(*lead, width) for lead in _LEADS]
    if not all(_agrees(target, variant, shape, LAYER_NORM) for shape in shapes):
        if all(_agrees(target, variant, shape, LAYER_NORM_OF_FLOAT32) for shape in shapes):
            raise Unproven(_NARROW)
        return None
    names = target.names
    return Norm((-1,), (-1,), tuple(shapes), names.get("scale"), names.get("bias"), x, variant=variant)


def _solved(target: Target, width: int) -> Variant | None:
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
    return Variant(name="to_rms_norm", eps=nice(max(eps, 0.0), 0.0) if eps > 1e-20 else 0.0, scale_offset=round(offset))


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


def recognise(
    layers: Iterable[tuple[str, Any]], key_of: Callable[[Any], Any], opened: Callable[[Any], tuple[Target, str]]
) -> tuple[dict[str, Norm], dict[str, str]]:
    """Of these layers, by name, those that are a LayerNorm; and why others that are one stay as they are.

    Args:
        layers: candidates.
        key_of: a key that is equal for layers which differ in the values of their parameters alone.
        opened: the target of a copy of a layer, and its name of x.
    """
    known: dict[Any, Norm | str | None] = {}
    for _, layer in (layers := list(layers)):
        if (key := key_of(layer)) not in known:
            try:
                target, x = opened(layer)
            except Exception as error:  # of the layer's class, which may refuse to be copied or opened in any way
                known[key] = f"it cannot be asked what it computes ({type(error).__name__}: {error})"
                continue
            try:
                known[key] = layer_norm(target, x)
            except Unproven as error:
                known[key] = str(error)
    answers = [(name, known[key_of(layer)]) for name, layer in layers]
    norms = {name: answer for name, answer in answers if isinstance(answer, Norm)}
    return norms, {name: answer for name, answer in answers if isinstance(answer, str)}
