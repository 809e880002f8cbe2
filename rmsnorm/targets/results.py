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
    shape, whole, has_residual = tuple(sent["x"].shape), described(result), "residual" in sent
    rows, size = math.prod(shape[:-1]), math.prod(shape)
    arrays = [entry for entry in result[1:] if isinstance(entry, array)]
    alike = [entry for entry in arrays if tuple(entry.shape) == shape]
    of_rows = [entry for entry in arrays if tuple(entry.shape) != shape and math.prod(entry.shape) == rows]
    unknown = ""
    if has_residual and len(result) == 2 and not arrays:
        unknown = f"{whole} whose second entry is {described(result[1])}"
    if not has_residual and not (arrays and all(e is sent["x"] or math.prod(e.shape) == rows for e in arrays)):
        unknown = whole
    total = alike[0] if has_residual and alike and (len(alike) == 1 or size != rows) else None
    return Results(result[0] if result else None, total, of_rows[-1] if of_rows else None, unknown)


def described(value: Any) -> str:
    """What came in place of an array, for a sentence."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if value is None:
        return "None"
    kind = type(value)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"
