"""Replaces LayerNorm by RMSNorm in Flax NNX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import numpy as jnp

from rmsnorm.conversion.layer_norm.convert import Model, Study, rounded
from rmsnorm.conversion.layer_norm.streams import Array, Axes, centred, drawn
from rmsnorm.conversion.replacement.flax import BACKEND, is_float, iter_modules
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.flax_impl.layers import RMSNorm
from rmsnorm.flax_impl.private import enable_x64
from rmsnorm.identify import Target, open_target
from rmsnorm.specification.variants import derive
from rmsnorm.targets.bridges import bridge


class SampledModel(Model):
    """A module of Flax NNX, which is cloned.

    Example:
        >>> from rmsnorm.conversion import to_rms_norm
        >>> rngs = nnx.Rngs(0)
        >>> model = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.LayerNorm(4, rngs=rngs), nnx.relu)
        >>> print(to_rms_norm(model, jnp.ones((2, 3))).layers[0])
        layers/1 (LayerNorm): now RMSNorm; eps 1e-06
    """

    backend = BACKEND

    def layers(self) -> list[tuple[str, nnx.Module]]:
        return list(BACKEND.modules(self.model))

    def own(self, layer: Any) -> Norm | str | None:
        if not isinstance(layer, nnx.LayerNorm):
            return None
        if type(layer).__call__ is not getattr(nnx.LayerNorm, "__call__"):  # noqa: B004, B009
            return f"it is {type(layer).__name__}, not flax.nnx.LayerNorm"
        if layer.axis_name is not None:
            return "its rows are spread over devices"
        axes, gain = (tuple([a] if isinstance(a, int) else a) for a in (layer.reduction_axes, layer.feature_axes))
        scale, bias = (name if getattr(layer, name) is not None else None for name in ("scale", "bias"))
        return Norm(axes, gain, scale, bias, "x", variant=derive("to_rms_norm", "flax", layer.epsilon, None))

    def opened(self, layer: nnx.Module) -> Target:
        return open_target(nnx.clone(layer))

    def elements(self) -> int:
        return sum(array.size for array in jax.tree.leaves(nnx.state(self.model, nnx.Param)))

    def study(self, norms: Mapping[str, Norm]) -> Study:
        inputs, options = self._widened((self.inputs, self.options))
        return _Study(self._wide(), inputs, options, norms)

    def changed(
        self, centre: Mapping[str, Sequence[Axes]], norms: Mapping[str, Norm], *, wide: bool
    ) -> tuple[nnx.Module, list[str]]:
        result = self._wide() if wide else nnx.clone(self.model)
        return result, _apply(result, centre, norms)

    def outputs(self, model: nnx.Module, *, wide: bool) -> list[np.ndarray]:
        sample = self.inputs, self.options
        inputs, options = self._widened(sample) if wide else sample
        clone: Any = nnx.clone(model)
        clone.eval()
        graph, state = nnx.split(clone)
        run = _Compiled(lambda state: _arrays(nnx.merge(graph, state)(*inputs, **options)))
        return [np.asarray(array) for array in run(state)]

    @contextlib.contextmanager
    def wide(self) -> Iterator[None]:
        with enable_x64(True), jax.numpy_dtype_promotion("standard"):
            yield

    def _widened(self, tree: Any) -> Any:
        def widened(value: Any) -> Any:
            is_array = isinstance(value, (jax.Array, np.ndarray)) and is_float(value)
            return jnp.asarray(value, self.dtype) if is_array else value

        return jax.tree.map(widened, tree)

    def _wide(self) -> nnx.Module:
        """A clone that computes in the wide dtype throughout."""
        graph, state = nnx.split(self.model)
        wide = nnx.merge(graph, self._widened(state))
        for _, module in list(iter_modules(wide)):
            layer: Any = module
            if getattr(layer, "dtype", None) is not None:
                layer.dtype = jnp.dtype(self.dtype)
        return wide


class _Study(Study):
    operations = jnp

    def __init__(self, model: Any, inputs: Any, options: Any, norms: Mapping[str, Norm]) -> None:
        super().__init__()
        self.bridge, self.norms = bridge("jax"), norms
        self.means: Mapping[str, Any] = {}  # for each norm 1 where it subtracts the mean, 0 where it is RMSNorm
        model.eval()
        for path, module in list(iter_modules(model)):
            name, layer = _name(path), module
            norm = norms.get(name)
            if norm is not None or (isinstance(layer, nnx.Dropout) and layer.rate > 0):
                layer.study = _Hashable((self, name, norm))
                layer.__class__ = _observed(type(layer))
        self.graph, state = nnx.split(model)
        self.flat = nnx.to_flat_state(state)
        parameters = [(_name(path), variable) for path, variable in self.flat if isinstance(variable, nnx.Param)]
        self.values = {name: np.asarray(variable[...]) for name, variable in parameters if is_float(variable)}

        def random(value: Any) -> Any:  # as the sample may have a mean of 0
            is_array = isinstance(value, jax.Array) and is_float(value)
            return jnp.asarray(drawn("x", np.asarray(value))) if is_array else value

        self.sample = jax.tree.map(random, (inputs, options))
        self.compiled = _Compiled(self._outputs)

    def sent(self, name: str, value: Array) -> Any:
        return jnp.asarray(value)

    def run(self, tensors: Mapping[str, Any]) -> list[Any]:
        outputs = self.compiled(tensors, {name: jnp.asarray(name not in self.rms, float) for name in self.norms})
        jax.effects_barrier()
        return outputs

    def _outputs(self, tensors: Mapping[str, Any], means: Mapping[str, Any]) -> list[Any]:
        self.means = means
        variables = [
            (path, variable.replace(tensors[_name(path)]) if _name(path) in tensors else variable)
            for path, variable in self.flat
        ]
        inputs, options = self.sample
        return _arrays(nnx.merge(self.graph, nnx.from_flat_state(variables))(*inputs, **options))

    def total(self, outputs: Sequence[Any], weights: Sequence[Array | None]) -> Any:
        pairs = [(y, w) for y, w in zip(outputs, weights, strict=True) if w is not None]
        return sum((jnp.sum(jnp.nan_to_num(y, posinf=0, neginf=0) * w).real for y, w in pairs), jnp.zeros(()))

    def note(self, name: str, size: int, mean: Any, square: Any) -> None:
        self.seen.note(name, size, mean, square)

    def call(self, layer: Any, name: str, norm: Norm | None, inputs: Any, named: Any) -> Any:
        x = inputs[0] if inputs else named.get("inputs" if norm is None else norm.x)
        axes = (-1,) if norm is None else norm.axes
        if norm is not None and (len(inputs) + sum(v is not None for v in named.values()) != 1 or not is_float(x)):
            self.seen.more.add(name)
            return type(layer).__mro__[1].__call__(layer, *inputs, **named)
        mean, square = self.moments(x, axes)
        jax.debug.callback(partial(self.note, name, x.size // max(mean.size, 1)), mean, square)
        if norm is None:  # a dropout
            return x
        scale, bias = (None if n is None else getattr(layer, n)[...] for n in (norm.scale, norm.bias))
        return self.normed(norm, x, self.means[name] * mean, scale, bias)


class _Compiled:
    """A function of arrays as one program; as it is where it needs the numbers themselves."""

    def __init__(self, function: Any) -> None:
        self.function, self.compiled = function, jax.jit(function)

    def __call__(self, *arrays: Any) -> list[Any]:
        try:
            return list(self.compiled(*arrays))
        except jax.errors.JAXTypeError:
            self.compiled = self.function
            return list(self.function(*arrays))


class _Hashable(tuple[Any, ...]):
    """What a module may hold as a constant: equal only to itself."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def _observed(kind: Any) -> Any:
    """A class of which every call goes to the study that it has."""

    def __call__(self: Any, *inputs: Any, **named: Any) -> Any:
        study, name, norm = self.study
        return study.call(self, name, norm, inputs, named)

    return type(kind)(kind.__name__, (kind,), {"__call__": __call__, "__module__": kind.__module__})


def _apply(model: nnx.Module, centre: Mapping[str, Sequence[Axes]], norms: Mapping[str, Norm]) -> list[str]:
    """Centres parameters and turns norms into RMSNorm, in place. Returns notes."""
    coarse: dict[str, list[str]] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if axes := centre.get(_name(path)):
            array = variable[...]
            _get(model, path)[...] = jnp.asarray(centred(np.asarray(array, np.float64), axes).astype(array.dtype))
            if array.dtype.itemsize < 4:
                coarse.setdefault(array.dtype.name, []).append(_name(path))
    for path, module in list(iter_modules(model)):
        norm, layer = norms.get(_name(path)), module
        if norm is not None and isinstance(layer, nnx.LayerNorm):
            layer.variant = norm.known
            layer.__class__ = RMSNorm
        elif norm is not None:
            BACKEND.become(layer, norm)
    return rounded(coarse)


def _arrays(outputs: Any) -> list[Any]:
    return [y for y in jax.tree.leaves(outputs) if hasattr(y, "dtype")]


def _name(path: Sequence[Any]) -> str:
    return "/".join(map(str, path))


def _get(model: Any, path: Sequence[Any]) -> Any:
    for key in path:
        model = getattr(model, key) if isinstance(key, str) and hasattr(model, key) else model[key]
    return model
