"""What a function returns beside y: x + residual and 1 / rho, by their shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Results(NamedTuple):
    """y, and what came with it; ``unknown`` describes an entry that is none of these, and is empty where all are known.

    ``total`` is x + residual, ``inverse_rms`` is 1 / rho, with any axes.
    """

    y: Any
    total: Any = None
    inverse_rms: Any = None
    unknown: str = ""


def results(result: Any, sent: Mapping[str, Any], array: Any) -> Results:
    """The entries of what a function returned for the arrays ``sent``, which are of the class ``array``.

    Of an array with a number for each row the last one is 1 / rho, as a mean may come before it. In rows of one element
    it may have the shape of x, and then nobody can tell which is which.
    """
    if not isinstance(result, (tuple, list)):
        return Results(result, unknown="" if isinstance(result, array) else described(result))
    x, whole = sent["x"], described(result)
    shape = tuple(x.shape)
    rows = math.prod(shape[:-1])
    first = result[0] if result else None
    total = inverse_rms = None
    recognised, alike = "residual" in sent, [e for e in result[1:] if isinstance(e, array) and tuple(e.shape) == shape]
    for place, entry in enumerate(result[1:]):
        if not isinstance(entry, array):
            if place == 0 and "residual" in sent and len(result) == 2:
                return Results(first, unknown=f"{whole} whose second entry is {described(entry)}")
            continue
        own = tuple(entry.shape)
        if own == shape and "residual" in sent and (len(alike) == 1 or math.prod(own) != rows):
            total = entry if total is None else total
        elif own != shape and math.prod(own) == rows:
            inverse_rms = entry
        elif not ("residual" in sent or entry is x or (own == shape and math.prod(own) == rows)):
            return Results(first, unknown=whole)
        recognised = True
    return Results(first, total, inverse_rms, "" if recognised else whole)


def described(value: Any) -> str:
    """What came in place of an array, for a sentence."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if value is None:
        return "None"
    kind = type(value)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"
