"""The first parameters: a new layer multiplies the normalised row by 1, and adds 0."""

from __future__ import annotations

from typing import Final

import numpy as np

from rmsnorm.accuracy.bounds import FORMULA
from rmsnorm.identify.affine import close, nearest_number
from rmsnorm.targets.bridges import Array

ASKED: Final = "float32"  # the dtype of x to ask in: a layer is made with parameters of it


def first_parameters(there: Array, back: Array, unit: Array, offset: float) -> tuple[float | None, list[str]]:
    """What a new layer multiplies the normalised row by, None for several numbers, and sentences on what is wrong.

    Args:
        there, back: y of x and of -x, in float64, with the layer's own parameters.
        unit: y of x with a gain that multiplies by 1, and without a bias.
        offset: o of the gain o + g.

    >>> x = np.linspace(-2, 2, 8)
    >>> first_parameters(2 * x, -2 * x, x, 1.0)
    (2.0, ['y of a new layer is 2 times the normalised row, as its gain g starts at 1 and 1 + g multiplies'])
    """
    sentences = []
    odd, even = (there - back) / 2, (there + back) / 2
    factor = nearest_number(float((odd * unit).sum() / max((unit**2).sum(), 1e-30)), FORMULA)
    of_all = close(odd, factor * unit, FORMULA)
    if not of_all:
        sentences.append("the gain of a new layer does not start at one number: its elements are different")
    elif factor != 1:
        times = f"{factor:.6g} times the normalised row" if factor else "0"
        gain = f"{offset:g} + g" if offset else "g"
        sentences.append(
            f"y of a new layer is {times}, as its gain g starts at {factor - offset:.6g} and {gain} multiplies"
        )
    if np.max(np.abs(even), initial=0.0) > FORMULA * np.max(np.abs(unit), initial=0.0):
        sentences.append("the bias of a new layer does not start at 0")
    return factor if of_all else None, sentences
