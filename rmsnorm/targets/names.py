"""Which parameter or input of a layer is which argument of RMSNorm, by its name and its shape."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

from rmsnorm.targets.arguments import argument_named, parameters_of, takes_array
from rmsnorm.targets.target import Shape


def assign(shapes: Mapping[str, Shape]) -> dict[str, str]:
    """The layer's own parameter for each argument, by their names and shapes.

    A vector called gate is gate_vector; the only parameter of a layer is the gain, whatever its name; one number
    beside the gain is factor.

    >>> assign({"norm.weight": (8,), "bias": (8,)})
    {'scale': 'norm.weight', 'bias': 'bias'}
    """
    own: dict[str, str] = {}
    for name, shape in shapes.items():
        argument = argument_named(name)
        if argument == "gate":
            argument = "gate_vector" if len(shape) == 1 else None
        if argument is None and name.rsplit(".", 1)[-1] == "offset":
            argument = "bias"  # the name that Zhang & Sennrich gave it
        if argument and argument not in own:
            own[argument] = name
    if not own and len(shapes) == 1:
        own["scale"] = next(iter(shapes))
    others = [name for name, shape in shapes.items() if name not in own.values() and math.prod(shape) == 1]
    if own and len(others) == 1:
        own["factor"] = others[0]
    return own


def assigned(shapes: Callable[[Shape], Mapping[str, Shape]], *tried: Shape) -> dict[str, str]:
    """``assign`` of the parameters that it has for x of the first shape that it takes; none if it takes none."""
    for shape in tried:
        with contextlib.suppress(Exception):  # a layer of somebody's may raise anything on x of this shape
            return assign(shapes(shape))
    return {}


def inputs_of(call: Callable[..., Any]) -> dict[str, str]:
    """The own names of gate, mask and residual where a layer's call takes them after x."""
    inputs: dict[str, str] = {}
    for parameter in (parameters_of(call) or ())[1:]:
        argument = argument_named(parameter.name)
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if argument in ("gate", "mask", "residual") and by_name and takes_array(parameter):
            inputs.setdefault(argument, parameter.name)
    return inputs


def renamed(arrays: Mapping[str, Any], own: Mapping[str, str]) -> dict[str, Any]:
    """The arrays that the layer takes, under its own names."""
    return {name: arrays[argument] for argument, name in own.items() if argument in arrays}
