"""The first parameters: a new layer multiplies the normalised row by 1, and adds 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from rmsnorm.accuracy.bounds import FORMULA
from rmsnorm.parity.comparison import Comparison
from rmsnorm.parity.judge import failed
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import Target, TargetError

ASKED: Final = "float32"  # the dtype of x to ask in: a layer is made with parameters of it


def first_parameters(target: Target, variant: Variant, shape: Sequence[int] = ()) -> list[Comparison]:
    """A failure for each sentence on what is wrong with y of a new layer; none where it takes no such rows.

    y of x and of -x with the layer's own parameters is compared with y of a gain that multiplies by 1, without a bias.
    ``shape``: of x, by default a few rows.
    """
    x = (8 * np.random.default_rng(23).normal(size=shape or (4, target.width or 64))).astype(ASKED)
    own = {name: value for name, value in (("scale", 1 - variant.scale_offset), ("bias", 0.0))
           if name in target.arguments}  # fmt: skip
    if not own:
        return []
    try:
        gate = {"gate": np.full_like(x, 2.0)} if "gate" in target.arguments else {}
        if "gate_vector" in target.arguments:
            gate["gate_vector"] = np.zeros(target.shape_of("gate_vector", x.shape), ASKED)
        one = {name: np.full(target.shape_of(name, x.shape), value, ASKED) for name, value in own.items()}
        with target.evaluating():
            y = target.forward(x, **gate), target.forward(-x, **gate), target.forward(x, **one, **gate)
    except TargetError:
        return []
    there, back, unit = (array.astype(np.float64) for array in y)
    sentences, odd, even = [], (there - back) / 2, (there + back) / 2
    factor = float((odd * unit).sum() / (unit**2).sum()) if unit.any() else 0.0
    whole = float(np.round(factor))
    factor = whole if abs(factor - whole) < FORMULA else factor
    largest = np.max(np.abs(unit), initial=0.0)
    apart = np.max(np.abs(odd - factor * unit), initial=0.0)
    if not apart <= FORMULA * max(1.0, abs(factor)) * largest:  # nor is NaN, as of memory that nobody has written
        sentences.append("the gain of a new layer does not start at one number: its elements are different")
    elif factor != 1:
        offset = variant.scale_offset
        times = f"{factor:.6g} times the normalised row" if factor else "0"
        gain = f"{offset:g} + g" if offset else "g"
        sentences.append(
            f"y of a new layer is {times}, as its gain g starts at {factor - offset:.6g} and {gain} multiplies"
        )
    if np.max(np.abs(even), initial=0.0) > FORMULA * largest:
        sentences.append("the bias of a new layer does not start at 0")
    return [failed("y", sentence) for sentence in sentences]
