"""Replaces a model's own RMSNorm modules, recognised by what they compute. A framework is imported when it is used."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any, Final

from rmsnorm.conversion.replacement.backend import Backend
from rmsnorm.conversion.replacement.change import change
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.proof import Proof
from rmsnorm.conversion.replacement.report import NoNorm, Replacement, Unproven, first_line, nothing
from rmsnorm.specification import errors
from rmsnorm.specification.variants import Variant, get_variant

__all__ = ["Replacement", "replace"]

_CLASSES: Final = (("keras", "keras", "Layer"), ("torch", "torch.nn", "Module"), ("flax", "flax.nnx", "Module"))
_MODELS: Final = "a torch.nn.Module, keras.Model or flax.nnx.Module"


def replace(model: Any, variant: str | Variant | None = None, *, dry_run: bool = False) -> tuple[Replacement, ...]:
    """Turn every module of a model that computes RMSNorm into one that computes it by rmsnorm, in place.

        y = h / rho * (o + weight) + bias,    rho = sqrt(mean(h_i^2) + eps)

    Each module stays the same object and an instance of its class: its parameters, their names, devices and dtypes, its
    attributes and methods, its hooks, its mode and all references to it stay valid. Only its call with x alone is
    computed anew (of a norm with a gate, the call with both), and only for numbers of axes that were tried; any other
    call runs the code that it ran before. A torch.nn.RMSNorm becomes rmsnorm.torch_impl.RMSNorm. A printed model of
    PyTorch or Flax says which norms are ours. Call this before the model is compiled or sharded.

    A replaced module keeps the eps that it had: to assign another one to its attribute of eps raises ValueError, unless
    it became a layer of rmsnorm. Like any layer that needs x for the backward pass, it takes no model that writes into
    x before that (``x += f(norm(x))``). In PyTorch its results lie in memory as those of torch.nn.RMSNorm.

    What makes the model anew makes the norms that it had: from_pretrained, load_model of a .keras file, from_config,
    keras.models.clone_model, and a PyTorch or Flax model that is built again before its weights are loaded. Call
    replace again after these. A deep copy, nnx.clone and a pickled PyTorch or Flax model (torch.save(model)) keep ours.
    A file of torch.export.save loads only after ``import rmsnorm.torch_impl``.

    Nothing changes before everything is decided, and if a change fails, all are taken back. A module is replaced if
    ``rmsnorm.identify`` names it, and if its copy with random parameters and the replacement agree with the golden in
    outputs and gradients, by the bounds of ``rmsnorm.parity.check``: in training and in evaluation, on x of one to five
    axes, with rows of zeros, NaN, infinity and outliers, in float16, bfloat16 and float32. It is not replaced if a call
    changes it or adds a loss, or if it normalises other axes than the last ones, each with a number of the gain.
    Of PyTorch, both must also agree in the circumstances of ``check``: calls at the width of the norm in which every
    pair of 1 to 8,209 rows, one to four axes, memory, values, gradients, modes (no_grad, inference, autocast) and what
    was called before occurs. A module that computes in the dtype of x throughout is asked these in float32 alone, and
    in float16 only for elements of x between 0.5 and 2. Of Flax, which compiles each shape, 16 and 64 bits are asked
    with one number of axes. Modules with the same class, attributes and shapes of parameters are asked once.

    A trial cannot show what a module does elsewhere: another formula for more rows, in three circumstances together,
    after some number of calls, on another device, for a value that was not tried, or a change of something outside of
    the module; and of Keras and Flax whatever only the circumstances show. Do not use replace on a model with such
    norms.

    Args:
        model: a torch.nn.Module, keras.Model or flax.nnx.Module. Candidates are modules with at most two parameters or
            buffers, whatever their names, and no module inside.
        variant: name of a preset, or a Variant, which every replaced module gets, together with its eps. None keeps
            the variant that each module computes.
        dry_run: whether only the report is made, which then says "would be" in place of "now".

    Returns:
        One entry for each module that computes RMSNorm and for every other one with "norm" in the name of its class:
        its variant, or why it was not replaced. One entry on the model where there are none.

    Raises:
        TypeError: the model is none; a flax.linen.Module is none, as it makes its modules anew in each call.
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
    backend = _backend(model)
    known: dict[Any, Proof | Unproven] = {}
    report: list[Replacement] = []
    changes: list[tuple[Any, Norm]] = []
    replaced = 0
    for name, module in list(backend.modules(model)):
        if backend.is_replaced(module):
            replaced += 1
            continue
        if not backend.is_candidate(module):
            continue
        kind = type(module).__name__
        try:
            norm, identity = _proven(backend, module, known)
        except Unproven as error:
            if "norm" in kind.lower() or not isinstance(error, NoNorm):
                report.append(Replacement(name, kind, None, str(error)))
            continue
        differences = () if chosen is None else identity.differences(chosen)
        norm = norm if chosen is None else norm.with_variant(chosen)
        why = "; ".join(differences) or _remark(backend.others(module), norm)
        report.append(Replacement(name, kind, norm.variant, why, not dry_run, norm.gate is not None, norm.group))
        changes.append((module, norm))
    if changes and not dry_run:
        change(changes, backend.become, functools.partial(backend.finish, model))
    return tuple(report) or (nothing(type(model).__name__, replaced),)


def _proven(backend: Backend, module: Any, known: dict[Any, Proof | Unproven]) -> Proof:
    """What a module computes; one answer for all modules with the same key.

    Raises:
        Unproven: the module must stay as it is, and why.
    """
    key = backend.key_of(module)
    if key not in known:
        try:
            known[key] = backend.prove(module)
        except Unproven as error:
            known[key] = error
        except Exception as error:  # of its class, whose code may raise anything when a module is copied or called
            known[key] = Unproven(f"it cannot be asked what it computes ({type(error).__name__}: {first_line(error)})")
    decision = known[key]
    if isinstance(decision, Unproven):
        raise decision
    backend.require_as_proven(module, decision.norm)
    return decision


def _backend(model: Any) -> Backend:
    """The backend for the model's framework.

    Raises:
        TypeError: there is none.
    """
    for name, module, kind in _CLASSES:
        if module in sys.modules and isinstance(model, getattr(sys.modules[module], kind)):
            backend: Backend = importlib.import_module(f"rmsnorm.conversion.replacement.{name}").BACKEND
            return backend
    fix = "make an object of it first" if isinstance(model, type) else "pass the model itself"
    if "flax.linen" in sys.modules and isinstance(model, sys.modules["flax.linen"].Module):
        fix = "a linen model makes its norms in each call; name rmsnorm.flax_impl.linen.RMSNorm in its code instead"
    raise errors.wrong_type("replace", "model", model, _MODELS, fix)


def _remark(others: list[str], norm: Norm) -> str:
    others = [name for name in others if name != norm.gate]
    gate = f", with a {norm.known.gate_function} gate {norm.known.gate_position} the norm" if norm.gate else ""
    form = f"recognised{gate}{f', in groups of {norm.group}' if norm.group else ''}"
    return f"{form}; with {', '.join(others)} it runs its own code" if others else form
