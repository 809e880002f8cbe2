"""The rows in hard_cases.json: how bits.py writes them, and test_hard_cases.py reads them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from rmsnorm.specification.variants import PRESETS


def row_of(problem: Any, index: int) -> dict[str, Any]:
    """The call on one row, as text: numbers in hexadecimal."""
    arrays = {name: array for name, array in problem.arrays.items() if array is not None and name not in ("dy", "dh")}
    parts = {name: array if array.ndim == 1 else array[index] for name, array in arrays.items()}
    variant = {key: None if value is None else str(value) for key, value in vars(problem.options["variant"]).items()}
    return {
        "variant": {key: variant[key] for key in ("name", "eps", "partial")},
        "arrays": {name: [part.dtype.name, [float(value).hex() for value in part]] for name, part in parts.items()},
    }


def same_kind(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two rows of the corpus are alike, so that one of them is enough."""
    same = all(one[key] == other[key] for key in ("found_by", "kind", "difference"))
    return same and one["arrays"]["x"][0] == other["arrays"]["x"][0]


def call_of(hard: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The arguments of rms_norm for a row of the corpus, and its variant."""
    eps, partial = hard["variant"]["eps"], hard["variant"]["partial"]
    fields = {"eps": None if eps is None else float(eps), "partial": None if partial is None else Fraction(partial)}
    arrays = {
        name: np.array([float.fromhex(number) for number in numbers]).astype(dtype)
        for name, (dtype, numbers) in hard["arrays"].items()
    }
    return arrays, PRESETS[hard["variant"]["name"]].replace(**fields)
