"""Replaces RMSNorm in Flax NNX. A copy of each module shows what it computes, and that its replacement does it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from rmsnorm.conversion.replacement.change import Replaced, called_with, computed, subclass, vector
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.proof import decide, require_gain_alone
from rmsnorm.conversion.replacement.report import Unproven
from rmsnorm.flax_impl.functional import rms_norm
from rmsnorm.flax_impl.layers import RMSNorm
from rmsnorm.identify import Identity, Target, open_target


def modules(model: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
    """Each module once, with its path."""
    for path, module in nnx.iter_modules(model):
        yield "/".join(map(str, path)), module


def is_replaced(module: nnx.Module) -> bool:
    return isinstance(module, (RMSNorm, Replaced))


def is_candidate(module: nnx.Module) -> bool:
    """Whether a module may be a norm: by its name, or as it has a gain at most and is not one of Flax's own."""
    if "norm" in type(module).__name__.lower():
        return True
    own = type(module).__module__.startswith("flax.")
    return not own and 1 <= len(_variables(module)) <= 2 and not _inner(module)


def prove(module: nnx.Module) -> tuple[Norm, Identity]:
    if _inner(module):
        raise Unproven("it has modules of its own")
    target = open_target(nnx.clone(module))
    require_gain_alone(target, list(_variables(module)))

    def replacement(norm: Norm) -> Target:
        ours = nnx.clone(module)
        become(ours, norm)
        return open_target(ours)

    asked = nnx.clone(module)
    if type(asked) is nnx.RMSNorm:
        asked.dtype = None
    norm, identity = decide(target, module.__call__, replacement, open_target(asked))
    if _changes(nnx.clone(module), *[jax.numpy.ones(norm.shapes[-1])] * (2 if norm.gate else 1)):
        raise Unproven("a call changes its state")
    return norm, identity


def _changes(module: nnx.Module, *inputs: Any) -> bool:
    before = _state(module)
    module(*inputs)
    return bool(_state(module) != before)


def _inner(module: nnx.Module) -> list[Any]:
    return [path for path, _ in nnx.iter_modules(module) if path]


def _variables(module: nnx.Module) -> dict[str, Any]:
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(module))}


def _state(module: nnx.Module) -> Any:
    graph, state = nnx.split(module)
    return graph, [leaf.tobytes() for leaf in jax.tree.leaves(state)]


def key_of(module: nnx.Module) -> Any:
    """A key that is equal for modules that differ only in the values of their parameters."""
    variables = [(name, variable.shape, variable.dtype) for name, variable in _variables(module).items()]
    return nnx.graphdef(module), tuple(variables)


def require_as_proven(module: nnx.Module, norm: Norm) -> None:
    """What was proven is a copy: it has all that the module has."""


def others(module: nnx.Module) -> list[str]:
    """What the call takes beside x."""
    return list(inspect.signature(module.__call__).parameters)[1:]


def become(module: Any, norm: Norm) -> None:
    """Turns a module into one of rmsnorm. It stays the same object, with the same variables and attributes."""
    if type(module) is not nnx.RMSNorm:
        kind: Any = type(module)
        module.__class__ = class_of(kind, norm)
        return
    module.__class__ = RMSNorm
    module.variant, module.epsilon = norm.known, norm.known.eps
    module.use_bias, module.bias = False, nnx.data(None)


@functools.cache
def class_of(kind: Any, norm: Norm) -> Any:
    """A class whose call with x alone, or with x and a gate, is that of rms_norm; all else is inherited."""

    def __call__(self: Any, *inputs: Any, **named: Any) -> Any:
        x, gate = called_with(norm, inputs, named)
        fits = hasattr(x, "shape") and (norm.gate is None or _is_gate_of(x, gate))
        if not fits or not norm.takes(x.shape):
            return kind.__call__(self, *inputs, **named)
        parameters = (None if name is None else getattr(self, name) for name in (norm.scale, norm.bias))
        scale, bias = (None if p is None else vector(jax.numpy, p[...], x, norm) for p in parameters)
        return computed(jax.numpy, rms_norm, norm, x.shape, x, scale, bias, gate)

    return subclass(class_of, kind, norm, "__call__", __call__)


def _is_gate_of(x: Any, gate: Any) -> bool:
    floating = all(hasattr(z, "dtype") and jax.numpy.isdtype(z.dtype, "real floating") for z in (x, gate))
    return floating and gate.shape == x.shape


def forget_traces(model: nnx.Module) -> None:
    """A compiled function sees the new classes by itself."""
