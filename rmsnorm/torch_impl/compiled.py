"""The functions as torch.compile and torch.fx have them: each one node of a graph, in which Dynamo traces nothing.

Dynamo would trace every check of the arguments, and compare each value that it had read in every later call.
AOTAutograd traces the recipe inside of a node. This is imported while Dynamo reads a program, and not before: the
import of Dynamo takes a second.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch

from rmsnorm.specification.variants import Variant
from rmsnorm.torch_impl.calls import compute, compute_vjp


@torch.compiler.allow_in_graph
def rms_norm_in_graph(options: Any, return_inverse_rms: bool, x: Any, *others: Any) -> Any:
    if isinstance(x, torch.fx.Proxy):
        arguments = options, return_inverse_rms, x, *others
        return x.tracer.create_proxy("call_function", rms_norm_in_graph, arguments, {})
    return compute(_options(*options), return_inverse_rms, x, *others)


@torch.compiler.allow_in_graph
def rms_norm_vjp_in_graph(options: Any, *tensors: Any) -> Any:
    return compute_vjp(_options(*options), *tensors)


def as_constants(variant: Any, eps: Any, partial: Any, *others: Any) -> tuple[Any, ...]:
    """The options as a graph holds them: a Variant as its text, a Fraction as a pair."""
    if isinstance(variant, Variant):
        variant = variant.json
    if partial is not None and isinstance(partial, Fraction):
        partial = partial.numerator, partial.denominator
    return variant, eps, partial, *others


def _options(variant: Any, eps: Any, partial: Any, axis: Any, feature_axis: Any, out_dtype: Any) -> tuple[Any, ...]:
    """The options of a call, from those that a graph holds.

    A number that the caller computed is a symbol to the compiler: as a number it becomes a condition of the program.
    """
    if isinstance(variant, str) and variant.startswith("{"):
        variant = Variant.from_json(variant)
    partial = Fraction(*map(int, partial)) if isinstance(partial, tuple) else _number(partial)
    return variant, _number(eps), partial, _number(axis), _number(feature_axis), out_dtype


def _number(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_number, value))
    if isinstance(value, torch.SymFloat):
        return float(value)
    return int(value) if isinstance(value, torch.SymInt) else value
