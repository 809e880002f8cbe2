"""Options of the authors' programs, checked: fields of a configuration by their own names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from rmsnorm.specification import errors


def pick(op: str, kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass that are among the options; the rest of the options is its field ``others``.

    Raises:
        ValueError: an option that has no default is missing.
    """
    known = {field.name: field for field in fields(kind) if field.name != "others"}
    missing = [name for name, field in known.items() if field.default is MISSING and name not in options]
    if missing:
        fix = "are they the options of another model?"
        raise ValueError(f"{op}: the options lack {', '.join(missing)}, expected in the options of this model; {fix}")
    own = {name: options[name] for name in known if name in options}
    return own | {"others": {name: value for name, value in options.items() if name not in known}}


def check_sizes(op: str, **sizes: Any) -> None:
    """Raise TypeError or ValueError unless all are positive integers."""
    for name, size in sizes.items():
        if type(size) is not int:
            raise errors.wrong_type(op, name, size, "an integer", "is it an option of another model?")
        if size < 1:
            raise errors.out_of_domain(op, name, size, "1 or more", "correct the options")


def check_flags(op: str, **flags: Any) -> None:
    """Raise ValueError unless all are true or false, or 1 or 0, as the authors' programs write them."""
    for name, flag in flags.items():
        if flag not in (0, 1):
            raise errors.out_of_domain(op, name, flag, "true or false", "correct the options")


def check_number(op: str, name: str, number: Any, low: float, high: float) -> None:
    """Raise ValueError unless it is a number between these."""
    if type(number) not in (int, float) or not low <= number <= high or not math.isfinite(number):
        raise errors.out_of_domain(op, name, number, f"a number from {low} to {high}", "correct the options")


def check_layer(op: str, name: str, layer: Any, layers: Mapping[str, Any]) -> None:
    """Raise ValueError unless it is the name of a recurrent layer."""
    if not isinstance(layer, str) or layer not in layers:
        raise errors.not_a_choice(op, name, layer, layers)
