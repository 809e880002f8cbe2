"""Replaces a model's own RMSNorm modules, recognised by what they compute. A framework is imported when it is used."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from rmsnorm import errors
from rmsnorm.conversion.replacement.report import Replacement
from rmsnorm.variants import Variant, get_variant

__all__ = ["Replacement", "replace"]

_CLASSES = (("torch", "torch.nn", "Module"),)


def replace(model: Any, variant: str | Variant | None = None, *, dry_run: bool = False) -> tuple[Replacement, ...]:
    """Turn every module of a model that computes RMSNorm into one that computes it by rmsnorm, in place.

        y = h / rho * (o + weight) + bias,    rho = sqrt(mean(h_i^2) + eps)

    Each module stays the same object and an instance of its class: its parameters, their names, devices and dtypes, its
    attributes and methods, its hooks, its mode and all references to it stay valid. Only its call with x alone is
    computed anew, and only for numbers of axes that were tried; any other call runs the code that it ran before. A
    torch.nn.RMSNorm becomes rmsnorm.torch_impl.RMSNorm. Call this before the model is compiled or sharded.

    Nothing changes before everything is decided. A module is replaced if its copy with random parameters gives the same
    outputs and gradients as the replacement: in training and in evaluation, called twice, on x of one to five axes, not
    contiguous ones too, in every dtype that it takes.

    Args:
        model: a torch.nn.Module. Candidates are modules with at most two parameters or buffers, whatever their names,
            and no module inside.
        variant: name of a preset, or a Variant, which every replaced module gets, together with its eps. None keeps
            the variant that each module computes.
        dry_run: whether only the report is made.

    Returns:
        One entry for each module that computes RMSNorm and for every other one with "norm" in the name of its class:
        its variant, or why it was not replaced. One entry on the model where there are none.

    Raises:
        TypeError: the model is none.
        TypeError, ValueError: the variant does not exist.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.RMSNorm(8, eps=1e-5), nn.LayerNorm(8))
        >>> for entry in replace(model):
        ...     print(entry)
        0 (RMSNorm): now RMSNorm, variant torch, eps 1e-05; recognised
        1 (LayerNorm): left; it computes LayerNorm
    """
    chosen = None if variant is None else get_variant("replace", variant)
    for name, module, kind in _CLASSES:
        if module in sys.modules and isinstance(model, getattr(sys.modules[module], kind)):
            backend = importlib.import_module(f"rmsnorm.conversion.replacement.{name}")
            report: tuple[Replacement, ...] = backend.replace(model, chosen, dry_run=dry_run)
            return report
    fix = "make an object of it first" if isinstance(model, type) else "pass the model itself"
    raise errors.wrong_type("replace", "model", model, "a torch.nn.Module", fix)
