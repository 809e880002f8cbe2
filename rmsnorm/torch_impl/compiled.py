"""What torch.compile has of this folder: rms_norm as one node of its graph, in which Dynamo traces nothing.

Dynamo would trace every check of the arguments, and compare each value that it had read in every later call. This is
imported while Dynamo reads a program, and not before: the import of Dynamo takes a second.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch

from rmsnorm.torch_impl import routes
from rmsnorm.variants import Variant


@torch.compiler.allow_in_graph
def rms_norm_in_graph(options: Any, *others: Any) -> Any:
    """rms_norm of a Variant as its text, and of a Fraction as a pair: a graph holds no objects."""
    # a number that the caller computed is a symbol to the compiler: as a number it becomes a condition of the program
    variant, partial, eps, axis, feature_axis, out_dtype = map(_number, options)
    if isinstance(variant, str) and variant.startswith("{"):
        variant = Variant.from_json(variant)
    partial = Fraction(*partial) if isinstance(partial, tuple) else partial
    return routes.rms_norm((variant, eps, partial, axis, feature_axis, out_dtype), *others)


def _number(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_number, value))
    if isinstance(value, torch.SymFloat):
        return float(value)
    return int(value) if isinstance(value, torch.SymInt) else value
