"""Replaces LayerNorm by RMSNorm in Keras: in models that are a graph of layers, or that their config builds again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from rmsnorm.conversion.layer_norm.sampled import Array, Norms, Sampled, Values
from rmsnorm.conversion.replacement.keras import BACKEND, is_float
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.report import first_line
from rmsnorm.specification import errors
from rmsnorm.specification.variants import get_variant
from rmsnorm.targets.bridges import bridge
from rmsnorm.targets.layers import keras_library, made_again
from rmsnorm.tf_impl.layers import RMSNormalization


class SampledModel(Sampled):
    backend = BACKEND
    tree_map, is_float = staticmethod(keras.tree.map_structure), staticmethod(is_float)

    def __init__(self, model: Any, inputs: Any, options: Any) -> None:
        if "training" in inspect.signature(model.call).parameters:
            options = {**options, "training": False}
        super().__init__(model, inputs, options)
        self.bridge = bridge(keras_library())
        model(*inputs, **options)  # this builds it

    def layers(self, model: Any) -> Iterator[tuple[str, Any]]:
        return _walk(model)

    def own(self, layer: Any) -> Norm | None:
        if type(layer) is not keras.layers.LayerNormalization or getattr(layer, "rms_scaling", False):
            return None
        axes = tuple(layer.axis) if isinstance(layer.axis, (list, tuple)) else (layer.axis,)
        scale, bias = (name if getattr(layer, name) is not None else None for name in ("gamma", "beta"))
        return Norm(axes, axes, scale, bias, "inputs", variant=get_variant("", "keras").replace(eps=layer.epsilon))

    def widen(self) -> None:
        self.copy = self._copied("float64")
        for layer in list(self.copy._flatten_layers()):
            layer.dtype_policy = "float64"
            graph = getattr(layer, "_functional", layer)  # of Sequential
            for each in (*keras.tree.flatten(graph.inputs), *graph.operations) if _is_graph(graph) else ():
                if type(each).__name__ in ("KerasTensor", "InputLayer", "Cast") and keras.backend.is_float_dtype(
                    each.dtype
                ):
                    object.__setattr__(each, "_dtype" if hasattr(each, "_dtype") else "dtype", "float64")
        self.variables = _parameters(self.copy)
        self.values = {name: _array(variable) for name, variable in self.variables.items()}

    def run(self, tensors: Mapping[str, Any], sample: Any) -> list[Any]:
        inputs, options = sample
        before = keras.config.floatx()
        keras.config.set_floatx("float64")
        try:
            with keras.StatelessScope(state_mapping=[(self.variables[name], t) for name, t in tensors.items()]):
                return list(keras.tree.flatten(self.copy(*inputs, **options)))
        finally:
            keras.config.set_floatx(before)

    def become(self, layer: Any, norm: Norm) -> None:
        if type(layer) is not keras.layers.LayerNormalization:
            BACKEND.become(layer, norm)
            return
        names = {"gamma_": "scale_", "beta_": "bias_", "center": "bias"}
        config = {key: value for key, value in layer.get_config().items() if key != "rms_scaling"}
        for old, new in names.items():
            config = {key.replace(old, new): value for key, value in config.items()}
        ours = RMSNormalization.from_config({**config, "epsilon": norm.known.eps})
        own = {name: value for name, value in vars(ours).items() if name not in vars(keras.layers.Layer())}
        object.__setattr__(layer, "__class__", RMSNormalization)
        vars(layer).update({**vars(ours), **vars(layer), **own, "scale": layer.gamma, "bias": layer.beta})

    def outputs(self, model: Any) -> list[Array]:
        inputs, options = self.sample
        return [_array(y) for y in keras.tree.flatten(model(*inputs, **options))]

    def changed(self, centred: Values, norms: Norms) -> tuple[Any, list[str]]:
        result = self._copied()
        for name, variable in _parameters(result).items():
            if name in centred:
                variable.assign(centred[name])
        for name, layer in list(_walk(result)):
            if name in norms:
                self.become(layer, norms[name])
        return result, []

    def _copied(self, dtype: str | None = None) -> Any:
        """The model anew with its weights: a clone of a graph, or what its config builds; in a dtype."""
        copies: dict[int, Any] = {}

        def copied(layer: Any) -> Any:  # once, also where a model and one within it share the layer
            if id(layer) not in copies:
                copies[id(layer)] = cloned(layer) if _is_graph(layer) else _anew(layer, dtype)
            return copies[id(layer)]

        def cloned(graph: Any) -> Any:  # the argument ``recursive`` of Keras 3.6 reaches one level
            return keras.models.clone_model(graph, clone_function=copied)

        try:
            result = copied(self.model)
        except (NotImplementedError, TypeError) as error:
            got = f"{type(self.model).__name__} ({first_line(error)})"
            want, fix = "a model that its config builds again", "give its class get_config, or use keras.Model"
            raise errors.out_of_domain("to_rms_norm", "the class of the model", got, want, fix) from None
        inputs, options = self.sample
        result(*inputs, **options)
        for (_, old), (_, new) in zip(_walk(self.model), _walk(result), strict=True):
            new.name = old.name  # those that a constructor makes are numbered anew
        result.set_weights(self.model.get_weights())
        return result


def _anew(layer: Any, dtype: str | None) -> Any:
    """A layer from its config, in a dtype; an operation is what it was, but a cast, whose dtype is chosen."""
    if isinstance(layer, keras.layers.Layer):
        return made_again(layer, layer.get_config(), keras.DTypePolicy(dtype) if dtype else layer.dtype_policy)
    return type(layer)(layer.dtype) if type(layer).__name__ == "Cast" else layer


def _walk(model: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    seen = set() if seen is None else seen
    for layer in model._flatten_layers(include_self=False, recursive=False):
        if id(layer) not in seen and not isinstance(layer, keras.layers.InputLayer):  # its name differs in a clone
            seen.add(id(layer))
            name = f"{path}/{layer.name}".lstrip("/")
            yield name, layer
            yield from _walk(layer, name, seen)


def _parameters(model: Any) -> dict[str, Any]:
    """The trainable variables, by the layer that has each."""
    owned = [(name, each) for name, layer in [("", model), *_walk(model)] for each in layer._trainable_variables]
    named = [(f"{name}/{variable.name}".lstrip("/"), variable) for name, variable in owned]
    return {name: variable for name, variable in named if keras.backend.is_float_dtype(variable.dtype)}


def _is_graph(model: Any) -> bool:
    """Whether a graph is all that it computes; the class of keras.Model(inputs, outputs) has no public name."""
    return getattr(type(model).call, "__qualname__", "") in ("Functional.call", "Sequential.call")


def _array(tensor: Any) -> Array:
    return np.asarray(tensor.numpy() if isinstance(tensor, keras.Variable) else keras.ops.convert_to_numpy(tensor))
