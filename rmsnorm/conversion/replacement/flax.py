"""Replaces RMSNorm in Flax NNX. A copy of each module shows what it computes, and that its replacement does it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Final

import jax
from flax import nnx

from rmsnorm.conversion.replacement.backend import Backend
from rmsnorm.conversion.replacement.change import Replaced, called_with, computed, subclass
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.proof import Proof, decide
from rmsnorm.conversion.replacement.report import Unproven
from rmsnorm.flax_impl.functional import rms_norm
from rmsnorm.flax_impl.layers import RMSNorm
from rmsnorm.identify import Target, open_target

# In Flax 0.11 it is a method.
iter_modules: Any = nnx.iter_modules if hasattr(nnx, "iter_modules") else nnx.Module.iter_modules


def _changes(module: nnx.Module, *inputs: Any) -> bool:
    before = _state(module)
    module(*inputs)
    return bool(_state(module) != before)


def _variables(module: nnx.Module) -> dict[str, Any]:
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(module))}


def _state(module: nnx.Module) -> Any:
    graph, state = nnx.split(module)
    return graph, [leaf.tobytes() for leaf in jax.tree.leaves(state)]


def _unstacked(module: nnx.Module) -> nnx.Module | None:
    """The first of the modules that nnx.vmap has stacked in one, as scan over layers has them; None where it is one."""
    graph, state = nnx.split(module)
    leaves = jax.tree.leaves(state)
    if {leaf.ndim for leaf in leaves} != {2} or len({leaf.shape[0] for leaf in leaves}) != 1:
        return None
    first: nnx.Module = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], state))
    return first


@functools.cache
def class_of(kind: Any, norm: Norm) -> Any:
    """A class whose call with x alone, or with x and a gate, is that of rms_norm; all else is inherited."""

    def __call__(self: Any, *inputs: Any, **named: Any) -> Any:
        x, gate = called_with(norm, is_float, inputs, named)
        if not hasattr(x, "shape") or not norm.takes(x.shape):
            return kind.__call__(self, *inputs, **named)
        parameters = (None if name is None else getattr(self, name) for name in (norm.scale, norm.bias))
        scale, bias = (None if p is None else p[...] for p in parameters)
        return computed(jax.numpy, rms_norm, norm, x.shape, x, scale, bias, gate)

    return subclass(class_of, kind, norm, __call__=__call__)


def is_float(value: Any) -> bool:
    return hasattr(value, "dtype") and bool(jax.numpy.issubdtype(value.dtype, jax.numpy.floating))


class Flax(Backend):
    package, call = "flax.", "__call__"

    def modules(self, model: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
        for path, module in iter_modules(model):
            yield "/".join(map(str, path)), module

    def is_replaced(self, module: nnx.Module) -> bool:
        return isinstance(module, (RMSNorm, Replaced))

    def tensors(self, module: nnx.Module) -> list[str]:
        return list(_variables(module))

    def has_inner(self, module: nnx.Module) -> bool:
        return any(path for path, _ in iter_modules(module))

    def prove(self, module: nnx.Module) -> Proof:
        if self.has_inner(module):
            raise Unproven("it has modules of its own")
        asked = nnx.clone(module)
        if type(asked) is nnx.RMSNorm:
            asked.dtype = None  # of y, which no variant says
        others = {*vars(nnx.Module()), *self.tensors(module)}
        own = {name: value for name, value in vars(module).items() if name not in others}
        try:
            return self._proven(asked, module, own)
        except Unproven:
            one = _unstacked(asked)
            if one is None:
                raise
            return self._proven(one, module, own)

    def _proven(self, asked: nnx.Module, module: nnx.Module, own: dict[str, Any]) -> Proof:
        def replacement(norm: Norm) -> Target:
            ours = nnx.clone(asked)
            self.become(ours, norm)
            return open_target(ours)

        proof = decide(open_target(nnx.clone(asked)), module.__call__, self.tensors(module), own, replacement)
        if _changes(nnx.clone(asked), *[jax.numpy.ones(proof.norm.example)] * (2 if proof.norm.gate else 1)):
            raise Unproven("a call changes its state")
        return proof

    def key_of(self, module: nnx.Module) -> Any:
        variables = [(name, variable.shape, variable.dtype) for name, variable in _variables(module).items()]
        return nnx.graphdef(module), tuple(variables)

    def become(self, module: Any, norm: Norm) -> None:
        if type(module) is not nnx.RMSNorm:
            kind: Any = type(module)
            module.__class__ = class_of(kind, norm)
            module.computed_by = "rmsnorm"  # which the model shows when it is printed
            return
        module.__class__ = RMSNorm
        module.variant, module.epsilon = norm.known, norm.known.eps
        module.use_bias, module.bias = False, nnx.data(None)


BACKEND: Final = Flax()
