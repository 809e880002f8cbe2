"""Replaces LayerNorm by RMSNorm in Flax NNX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import numpy as jnp

from rmsnorm.conversion.layer_norm.sampled import Array, Norms, Sampled, Values
from rmsnorm.conversion.replacement.flax import BACKEND, is_float, iter_modules
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.flax_impl.layers import RMSNorm
from rmsnorm.specification.variants import derive
from rmsnorm.targets.bridges import bridge

JAX = bridge("jax")


class SampledModel(Sampled):
    backend, bridge = BACKEND, JAX
    tree_map, is_float = staticmethod(jax.tree.map), staticmethod(is_float)

    def own(self, layer: Any) -> Norm | None:
        is_own = isinstance(layer, nnx.LayerNorm) and type(layer).__call__ is getattr(nnx.LayerNorm, "__call__")  # noqa: B004, B009
        if not is_own or layer.axis_name is not None:  # whose rows are spread over devices
            return None
        axes, gain = (tuple([a] if isinstance(a, int) else a) for a in (layer.reduction_axes, layer.feature_axes))
        scale, bias = (name if getattr(layer, name) is not None else None for name in ("scale", "bias"))
        return Norm(axes, gain, scale, bias, "x", variant=derive("to_rms_norm", "flax", layer.epsilon, None))

    def widen(self) -> None:
        graph, state = nnx.split(self.model)
        self.copy = nnx.merge(graph, self.mapped(lambda x: x, state))
        self.copy.eval()
        for _, module in list(iter_modules(self.copy)):
            layer: Any = module
            if getattr(layer, "dtype", None) is not None:
                layer.dtype = jnp.dtype("float64")
        flat = nnx.to_flat_state(nnx.state(self.copy, nnx.Param))
        self.values = {_name(path): np.asarray(v[...]) for path, v in flat if is_float(v)}

    def run(self, tensors: Mapping[str, Any], sample: Any) -> list[Any]:
        inputs, options = sample
        return _arrays(_with(self.copy, tensors)(*inputs, **options))

    def become(self, layer: Any, norm: Norm) -> None:
        if isinstance(layer, nnx.LayerNorm):
            layer.__class__ = RMSNorm
            layer.variant, layer.epsilon = norm.known, norm.known.eps
        else:
            BACKEND.become(layer, norm)

    def outputs(self, model: Any) -> list[Array]:
        clone: Any = nnx.clone(model)
        clone.eval()
        inputs, options = self.sample
        return [np.asarray(y) for y in _arrays(clone(*inputs, **options))]

    def changed(self, centred: Values, norms: Norms) -> tuple[Any, list[str]]:
        result = _with(self.model, {name: jnp.asarray(value) for name, value in centred.items()})
        for name, layer in list(self.layers(result)):
            if name in norms:
                self.become(layer, norms[name])
        return result, []


def _with(model: Any, arrays: Mapping[str, Any]) -> Any:
    """A copy of a module, with these arrays in place of its own."""
    graph, state = nnx.split(model)

    def chosen(path: Any, variable: Any) -> Any:
        array = arrays.get(_name(path))
        return variable if array is None else variable.replace(array.astype(variable.dtype))

    return nnx.merge(graph, nnx.from_flat_state([(path, chosen(path, v)) for path, v in nnx.to_flat_state(state)]))


def _arrays(outputs: Any) -> list[Any]:
    return [y for y in jax.tree.leaves(outputs) if hasattr(y, "dtype")]


def _name(path: Sequence[Any]) -> str:
    return "/".join(map(str, path))
