"""Replaces LayerNorm by RMSNorm in Keras: in models that are a graph of layers, or that their config builds again."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import keras
import numpy as np

from rmsnorm.conversion.layer_norm.convert import Model, Study, rounded
from rmsnorm.conversion.layer_norm.streams import Array, Axes, centred, drawn
from rmsnorm.conversion.replacement.keras import BACKEND
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.identify import Target
from rmsnorm.specification import errors
from rmsnorm.specification.variants import get_variant
from rmsnorm.targets.bridges import bridge
from rmsnorm.targets.layers import open_keras
from rmsnorm.tf_impl.layers import RMSNormalization


class SampledModel(Model):
    """A model of Keras, which is cloned, or built again from its config.

    Example:
        >>> from rmsnorm.conversion import to_rms_norm
        >>> keras.utils.set_random_seed(0)
        >>> layers = [keras.layers.Dense(4, name="dense"), keras.layers.LayerNormalization(name="norm")]
        >>> print(to_rms_norm(keras.Sequential(layers), np.ones((2, 3), "float32")).layers[0])
        norm (LayerNormalization): now RMSNorm; eps 0.001
    """

    backend = BACKEND

    def __init__(self, model: Any, inputs: Any, options: Any) -> None:
        super().__init__(model, inputs, {**options, "training": False})
        with contextlib.suppress(TypeError):  # a model whose call has no such argument
            model(*inputs, **self.options)  # this call builds the model
        if not model.built:
            model(*inputs, **options)
            self.options = options

    def layers(self) -> Iterator[tuple[str, Any]]:
        return _walk(self.model)

    def own(self, layer: Any) -> Norm | str | None:
        if type(layer) is not keras.layers.LayerNormalization:
            return None
        if getattr(layer, "rms_scaling", False):
            return "rms_scaling=True divides by the root of the variance"
        axes = tuple(layer.axis) if isinstance(layer.axis, (list, tuple)) else (layer.axis,)
        scale, bias = (name if getattr(layer, name) is not None else None for name in ("gamma", "beta"))
        return Norm(axes, axes, scale, bias, "inputs", variant=get_variant("", "keras").replace(eps=layer.epsilon))

    def opened(self, layer: Any) -> Target:
        return open_keras(layer, layer.name, "cpu")

    def elements(self) -> int:
        return int(self.model.count_params())

    def study(self, norms: Mapping[str, Norm]) -> Study:
        return _Study(_copied(self.model, self.inputs, self.options, self.dtype), self.inputs, self.options, norms)

    def changed(
        self, centre: Mapping[str, Sequence[Axes]], norms: Mapping[str, Norm], *, wide: bool
    ) -> tuple[Any, list[str]]:
        copied = _copied(self.model, self.inputs, self.options, self.dtype if wide else None)
        return copied, _apply(copied, centre, norms)

    def outputs(self, model: Any, *, wide: bool) -> list[np.ndarray]:
        with _floats(self.dtype if wide else None):
            y = model(*_sample(self.inputs, self.dtype if wide else None), **self.options)
        return [_array(tensor) for tensor in keras.tree.flatten(y)]

    def wide(self) -> contextlib.AbstractContextManager[Any]:
        return bridge(keras.backend.backend()).precision(self.dtype == "float64")


class _Study(Study):
    operations = keras.ops

    def __init__(self, model: Any, inputs: Any, options: Any, norms: Mapping[str, Norm]) -> None:
        super().__init__()
        self.bridge, self.model, self.options = bridge(keras.backend.backend()), model, options
        self.variables = _parameters(model)
        self.values = {name: _array(variable) for name, variable in self.variables.items()}
        self.dtype = next((value.dtype.name for value in self.values.values()), "float64")
        for name, layer in _walk(model):
            if name in norms:
                call = partial(self._norm, name, layer, norms[name], layer.call)
            elif getattr(layer, "rate", 0) and "Dropout" in type(layer).__name__:
                call = partial(self._dropout, name)
            else:
                continue
            object.__setattr__(layer, "call", call)
        random = [drawn("x", _array(x)) if _is_float(x) else x for x in keras.tree.flatten(inputs)]
        self.inputs = _sample(keras.tree.pack_sequence_as(inputs, random), self.dtype)

    def sent(self, name: str, value: Array) -> Any:
        return keras.ops.convert_to_tensor(value, dtype=self.dtype)

    def run(self, tensors: Mapping[str, Any]) -> list[Any]:
        mapping = [(self.variables[name], tensor) for name, tensor in tensors.items()]
        with _floats(self.dtype), keras.StatelessScope(state_mapping=mapping):
            return keras.tree.flatten(self.model(*self.inputs, **self.options))

    def total(self, outputs: Sequence[Any], weights: Sequence[Array | None]) -> Any:
        pairs = [(y, w) for y, w in zip(outputs, weights, strict=True) if w is not None]
        sums = (keras.ops.sum(keras.ops.nan_to_num(y, posinf=0, neginf=0) * self.sent("", w)) for y, w in pairs)
        return sum(sums, keras.ops.zeros((), self.dtype))

    def _norm(self, name: str, layer: Any, norm: Norm, own: Any, *inputs: Any, **named: Any) -> Any:
        named = {key: value for key, value in named.items() if key not in ("training", "mask") and value is not None}
        x: Any = inputs[0] if inputs else named.get(norm.x)
        if len(inputs) + len(named) != 1 or not _is_float(x):
            self.seen.more.add(name)
            return own(*inputs, **named)
        mean, square = self.moments(x, norm.axes)
        self._note(name, int(np.prod([x.shape[axis] for axis in norm.axes])), mean, square)
        scale, bias = (_weight(layer, entry) for entry in (norm.scale, norm.bias))
        return self.normed(norm, x, 0 if name in self.rms else mean, scale, bias)

    def _dropout(self, name: str, x: Any, **_: Any) -> Any:
        self._note(name, 0, *self.moments(x, (-1,)))
        return x

    def _note(self, name: str, size: int, mean: Any, square: Any) -> None:
        with contextlib.suppress(Exception):  # of a gradient's tracer
            mean, square = _array(mean), _array(square)
            self.seen.note(name, size, mean, square)


def _apply(model: Any, centre: Mapping[str, Sequence[Axes]], norms: Mapping[str, Norm]) -> list[str]:
    """Centres parameters and turns norms into RMSNorm, in place. Returns notes."""
    variables, coarse = _parameters(model), dict[str, list[str]]()
    for name, axes in centre.items():
        variable = variables[name]
        variable.assign(centred(_array(variable).astype(np.float64), axes))
        if np.dtype(_array(variable).dtype).itemsize < 4:
            coarse.setdefault(variable.dtype, []).append(name)
    for name, layer in list(_walk(model)):
        if name in norms and type(layer) is keras.layers.LayerNormalization:
            _become(layer)
        elif name in norms:
            BACKEND.become(layer, norms[name])
    return rounded(coarse)


def _become(layer: Any) -> None:
    """Turns Keras's layer into ours, with its weights and its other attributes."""
    ours = RMSNormalization(
        layer.axis, layer.epsilon, scale=layer.scale, bias=layer.center, name=layer.name, dtype=layer.dtype_policy,
        trainable=layer.trainable, scale_initializer=layer.gamma_initializer, bias_initializer=layer.beta_initializer,
        scale_regularizer=layer.gamma_regularizer, bias_regularizer=layer.beta_regularizer,
        scale_constraint=layer.gamma_constraint, bias_constraint=layer.beta_constraint,
    )  # fmt: skip
    attributes = {**vars(ours), **vars(layer), **{name: vars(ours)[name] for name in vars(ours).keys() - _common()}}
    gain, bias = layer.gamma, layer.beta
    object.__setattr__(layer, "__class__", RMSNormalization)
    vars(layer).update(attributes)
    vars(layer).update(scale=gain, bias=bias)


@cache
def _common() -> frozenset[str]:
    return frozenset(vars(keras.layers.Layer()))


def _copied(model: Any, inputs: Any, options: Any, dtype: str | None) -> Any:
    """The model anew with its weights: a clone of a graph, or what its config builds; in ``dtype`` if there is one."""
    copies: dict[int, Any] = {}

    def copied(layer: Any) -> Any:  # once, also where a model and one within it share the layer
        if id(layer) not in copies:
            copies[id(layer)] = cloned(layer) if _is_graph(layer) else copy_of(layer)
        return copies[id(layer)]

    def cloned(graph: Any) -> Any:  # the argument ``recursive`` of Keras 3.6 reaches one level
        return keras.models.clone_model(graph, clone_function=copied)

    def copy_of(layer: Any) -> Any:
        if not isinstance(layer, keras.layers.Layer):
            is_cast = type(layer).__name__ == "Cast" and keras.backend.is_float_dtype(layer.dtype)
            return type(layer)(dtype) if is_cast and dtype is not None else layer
        config = layer.get_config()
        if dtype is not None and "dtype" in config:
            config["dtype"] = dtype
        wanted = inspect.signature(type(layer).__init__).parameters
        if not any(entry.kind is entry.VAR_KEYWORD for entry in wanted.values()):
            # what Keras adds to the config of a class that may not take it
            config = {k: v for k, v in config.items() if k in wanted or k not in ("name", "trainable", "dtype")}
        copy = type(layer).from_config(config)
        copy.name = layer.name  # not in the config that Keras makes for a class without get_config
        return copy

    with _floats(dtype):
        try:
            result = copied(model)
        except (NotImplementedError, TypeError) as error:
            want, fix = (
                "a model that its config builds again",
                "give its class get_config, or build it with keras.Model",
            )
            got = f"{type(model).__name__} ({str(error).strip().partition(chr(10))[0]})"
            raise errors.out_of_domain("to_rms_norm", "the class of the model", got, want, fix) from None
        if dtype is not None:
            _widen(result, dtype)
        result(*_sample(inputs, dtype), **options)
    for (_, old), (_, new) in zip(_walk(model), _walk(result), strict=True):
        new.name = old.name  # those that a constructor makes are numbered anew
    result.set_weights([weight.astype(dtype or weight.dtype) for weight in model.get_weights()])
    return result


def _widen(model: Any, dtype: str) -> None:
    """Every layer computes in ``dtype``, and takes inputs of it."""
    for layer in model._flatten_layers():
        layer.dtype_policy = dtype
        if isinstance(layer, keras.layers.InputLayer) and keras.backend.is_float_dtype(layer.dtype):
            layer._dtype = dtype
        graph = layer._functional if isinstance(layer, keras.Sequential) else layer
        for tensor in keras.tree.flatten(graph.inputs) if graph is not None and _is_graph(graph) else ():
            if keras.backend.is_float_dtype(tensor.dtype):
                object.__setattr__(tensor, "_dtype" if hasattr(tensor, "_dtype") else "dtype", dtype)


@contextlib.contextmanager
def _floats(dtype: str | None) -> Iterator[None]:
    """Within it new layers have a dtype."""
    if dtype is None:
        yield
        return
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def _sample(inputs: Any, dtype: str | None) -> Any:
    def widened(x: Any) -> Any:
        return keras.ops.convert_to_tensor(x, dtype=dtype) if dtype is not None and _is_float(x) else x

    return keras.tree.map_structure(widened, inputs)


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


def _weight(layer: Any, name: str | None) -> Any:
    return next((weight.value for weight in layer.weights if weight.name == name), None)


def _is_graph(model: Any) -> bool:
    kinds = (keras.Sequential, _functional())
    return isinstance(model, kinds) and any(type(model).call is kind.call for kind in kinds)


@cache
def _functional() -> Any:
    """The class of keras.Model(inputs, outputs), which has no public name."""
    x = keras.Input((1,), name="x")  # by a name, as Keras numbers what has none
    return type(keras.Model(x, keras.layers.Identity(name="y")(x), name="model"))


def _array(tensor: Any) -> Array:
    return np.asarray(tensor.numpy() if isinstance(tensor, keras.Variable) else keras.ops.convert_to_numpy(tensor))


def _is_float(value: Any) -> bool:
    has_dtype = hasattr(value, "dtype")
    return has_dtype and bool(keras.backend.is_float_dtype(keras.backend.standardize_dtype(value.dtype)))
