"""Tells a whole model from a norm: by its parts, before anything is called."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final

_MODULES: Final = (("keras", "Layer"), ("torch.nn", "Module"), ("flax.nnx", "Module"))  # that replace takes


def is_model(thing: Any) -> bool:
    """Whether a module of PyTorch, Keras or Flax nnx is a model: two or more of its parts are norms or have parameters.

    A norm is a part as a whole. A class with "norm" in its name is none, whatever it holds, and neither is a module
    around one norm.

    Example:
        >>> from torch import nn
        >>> is_model(nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8))), is_model(nn.Sequential(nn.RMSNorm(8)))
        (True, False)
    """
    kind = next(
        (m for m, name in _MODULES if m in sys.modules and isinstance(thing, getattr(sys.modules[m], name))), ""
    )
    return bool(kind) and not _is_norm(thing) and sum(_parts(part, kind) for part in _inner(thing, kind)) > 1


def _is_norm(thing: Any) -> bool:
    return "norm" in type(thing).__name__.lower()


def _parts(thing: Any, kind: str) -> int:
    """How many norms and modules with parameters of their own there are in a module, itself among them."""
    if _is_norm(thing):
        return 1
    inner = _inner(thing, kind)
    return int(_has_own(thing, kind, inner)) + sum(_parts(part, kind) for part in inner)


def _inner(thing: Any, kind: str) -> list[Any]:
    """The modules right inside of one."""
    if kind == "torch.nn":
        return list(thing.children())
    if kind == "keras":
        return [part for part in thing._flatten_layers(include_self=False, recursive=False) if part is not thing]
    return _inside(vars(thing).values(), sys.modules[kind].Module)


def _inside(values: Iterable[Any], base: type) -> list[Any]:
    """The modules of nnx among values, and in their lists and dictionaries."""
    modules = []
    for value in values:
        if isinstance(value, base):
            modules.append(value)
        elif isinstance(value, (list, tuple, dict)):
            modules += _inside(value.values() if isinstance(value, dict) else value, base)
    return modules


def _has_own(thing: Any, kind: str, inner: list[Any]) -> bool:
    """Whether it has parameters beside those of the modules inside; a layer of Keras that is not built may get some."""
    if kind == "torch.nn":
        return next(thing.parameters(recurse=False), None) is not None
    if kind == "keras":
        return not inner and bool(thing.weights or not thing.built)
    return any(isinstance(value, sys.modules[kind].Variable) for value in vars(thing).values())
