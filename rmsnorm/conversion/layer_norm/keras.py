"""Replaces LayerNorm by RMSNorm in Keras. The graph is that of a functional or Sequential model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import Any, Final

import keras
import numpy as np

from rmsnorm.accuracy.bounds import CONVERSION, CONVERSION_OF_FLOAT32
from rmsnorm.conversion.layer_norm.convert import Model, Norms, Trace
from rmsnorm.conversion.layer_norm.streams import Node, Operand, Plan, Rule, Value, moved, spread, sum_of
from rmsnorm.conversion.replacement.keras import BACKEND
from rmsnorm.identify import Target
from rmsnorm.specification import errors
from rmsnorm.targets.layers import open_keras
from rmsnorm.tf_impl.layers import RMSNormalization

_SAME: Final = {
    "ActivityRegularization", "AlphaDropout", "Cast", "Dropout", "GaussianDropout", "GaussianNoise", "Identity",
    "Negative", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D",
}  # fmt: skip
_MOVES: Final = {
    "BroadcastTo", "Concatenate", "Cropping1D", "Cropping2D", "Cropping3D", "ExpandDims", "Flatten", "Flip", "GetItem",
    "Moveaxis", "Permute", "Repeat", "RepeatVector", "Reshape", "Roll", "Slice", "Split", "Squeeze", "Stack",
    "Swapaxes", "Take", "Tile", "Transpose",
}  # fmt: skip
_CONVOLUTIONS: Final = {f"Conv{rank}D{kind}" for rank in (1, 2, 3) for kind in ("", "Transpose")}
# The names of the weights that are known.
_WEIGHTS: Final = ("kernel", "bias", "embeddings", "_output_dense.kernel", "_output_dense.bias", "beta")


class SampledModel(Model):
    """A functional or Sequential model of Keras, which is cloned.

    Example:
        >>> from rmsnorm.conversion import to_rms_norm
        >>> keras.utils.set_random_seed(0)
        >>> layers = [keras.layers.Dense(4, name="dense"), keras.layers.LayerNormalization(name="norm")]
        >>> print(to_rms_norm(keras.Sequential(layers), np.ones((2, 3), "float32")).layers[0])
        norm (LayerNormalization): now RMSNorm; eps 0.001, centred dense/bias, dense/kernel
    """

    backend = BACKEND

    def __init__(self, model: Any, inputs: Any, options: Any) -> None:
        if not _is_graph(model):
            want = "a functional or Sequential model, whose graph of layers is known"
            fix = "build it with keras.Model(inputs, outputs)"
            raise errors.out_of_domain("to_rms_norm", "the class of the model", type(model).__name__, want, fix)
        super().__init__(model, inputs, options)
        model(*inputs, **options, training=False)  # this call builds the model
        is_wide = keras.backend.backend() == "tensorflow"
        self.dtype, self.bound = ("float64", CONVERSION) if is_wide else ("float32", CONVERSION_OF_FLOAT32)

    def layers(self) -> Iterator[tuple[str, Any]]:
        for path, layer in _walk(self.model):
            yield path, layer
            yield from ((name, norm) for name, norm in _norms_in(path, layer) if norm is not layer)

    def may_be_layer_norm(self, layer: Any) -> bool:
        return isinstance(layer, keras.layers.Layer) and layer.built and super().may_be_layer_norm(layer)

    def opened(self, layer: Any) -> Target:
        return open_keras(layer, layer.name, "cpu")

    def trace(self, recognised: Norms) -> Trace:
        return _Trace(self.model, self.inputs, recognised)

    def changed(self, plan: Plan | None, recognised: Norms, *, wide: bool) -> tuple[Any, list[str]]:
        return _apply(self.model, plan, recognised, self.dtype if wide else None), []

    def outputs(self, model: Any, *, wide: bool) -> list[np.ndarray]:
        y = _evaluate(model, *self.inputs) if wide else model(*self.inputs, **self.options, training=False)
        return [_array(tensor) for tensor in keras.tree.flatten(y)]


def _array(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.numpy() if isinstance(tensor, keras.Variable) else keras.ops.convert_to_numpy(tensor))


class _Trace(Trace):
    """The graph of a run on the sample inputs: every layer and operation."""

    fetched = staticmethod(_array)

    def __init__(self, model: Any, inputs: Any, recognised: Norms) -> None:
        super().__init__()
        self._recognised = recognised
        self._paths: dict[int, str] = {}
        self._leaves: dict[int, Value] = {}
        tensors = [keras.ops.convert_to_tensor(array) for array in keras.tree.flatten(inputs)]
        for tensor in tensors:
            self._enter(tensor, Value(tuple(tensor.shape), "the model's input", obstacle="has a mean of its own"))
        for tensor in keras.tree.flatten(self._run(model, "", *tensors)):
            if _is_float(tensor):
                self._value(tensor).is_output = True

    def _run(self, model: Any, path: str, *inputs: Any) -> Any:
        return _run_graph(model, lambda operation: partial(self._call, path, operation), inputs)

    def _call(self, path: str, operation: Any, *args: Any, **kwargs: Any) -> Any:
        path = self._paths.setdefault(id(operation), f"{path}/{operation.name}".lstrip("/"))
        if _is_graph(operation):
            return self._run(operation, path, *args)
        arguments = [tensor for tensor in keras.tree.flatten((args, kwargs)) if _is_float(tensor)]
        inputs = [self._value(tensor) for tensor in arguments]
        out = operation(*args, **kwargs)
        if type(operation).__name__ in _SAME and (_get(operation, "rate") or _get(operation, "stddev")):
            self.dropouts.append((path, inputs[0]))
        results = [tensor for tensor in keras.tree.flatten(out) if _is_float(tensor)]
        if results and all(any(result is argument for argument in arguments) for result in results):
            return out
        outputs = [Value(tuple(tensor.shape)) for tensor in results]
        leaves = {id(variable): self._leaf(path, operation, variable) for variable in getattr(operation, "weights", [])}
        node = Node(f"{path} ({type(operation).__name__})", [*inputs, *leaves.values()], outputs)
        if type(operation) is keras.layers.LayerNormalization:
            axes = operation.axis if isinstance(operation.axis, (list, tuple)) else [operation.axis]
            gain, bias = operation.gamma, operation.beta
            node.norm = self._norm(path, axes, args[0].shape, gain, bias, leaves.get(id(bias)))
            if operation.rms_scaling:
                self.obstacles[path] = "rms_scaling=True divides by the root of the variance"
        elif path in self._recognised and len(inputs) == 1:
            names = self._recognised[path].scale, self._recognised[path].bias
            gain, bias = (next((v for v in operation.weights if v.name == name), None) for name in names)
            node.norm = self._norm(path, [-1], arguments[0].shape, gain, bias, leaves.get(id(bias)))
        elif outputs:
            node.rule = _rule(operation, args, kwargs, inputs, leaves, outputs[0])
            self._find_hidden_norms(path, operation)
        self.nodes.append(node)
        for tensor, value in zip(results, outputs, strict=True):
            self._enter(tensor, value)
        return out

    def _find_hidden_norms(self, path: str, operation: Any) -> None:
        for name, _ in _norms_in(path, operation):
            self.obstacles[name] = f"it is part of {path} ({type(operation).__name__}), which does not show its graph"

    def _leaf(self, path: str, layer: Any, variable: Any) -> Value:
        if id(variable) not in self._leaves:
            known = next((name for name in _WEIGHTS if variable is _get(layer, name)), None)
            name = f"{path}/{known or variable.name}"
            parameter = None if known is None else name
            self._leaves[id(variable)] = Value(tuple(variable.shape), name, parameter, "is an unknown kind of weight")
            if np.dtype(variable.numpy().dtype).itemsize < 4:
                self.coarse[name] = variable.dtype
        return self._leaves[id(variable)]


def _norms_in(path: str, operation: Any) -> Iterator[tuple[str, Any]]:
    """Keras's LayerNorms inside a layer, which may be one itself, by their names."""
    for layer in operation._flatten_layers() if isinstance(operation, keras.layers.Layer) else ():
        if isinstance(layer, keras.layers.LayerNormalization):
            yield path if layer is operation else f"{path}/{layer.name}", layer


def _rule(
    layer: Any, args: Any, kwargs: Any, inputs: Sequence[Value], leaves: dict[int, Value], output: Value
) -> Rule | None:
    """The rule of a layer or an operation of Keras; None if it is not linear."""
    kind, shape, last = type(layer).__name__, output.shape, len(output.shape) - 1
    if not type(layer).__module__.startswith("keras."):
        return None

    def along(name: str, axes: dict[int, int]) -> Operand:
        return Operand(leaves[id(_get(layer, name))], axes)

    def bias(name: str, axis: int) -> list[list[Operand]]:
        return [] if _get(layer, name) is None else [[along(name, {axis: len(_get(layer, name).shape) - 1})]]

    if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
        return None
    if getattr(layer, "activation", None) not in (None, keras.activations.linear):
        return None
    if kind in _SAME or kind == "Activation":
        return sum_of([spread(inputs[0], inputs[0].shape, shape)])
    if kind in _MOVES:
        return moved(inputs, partial(_move, layer, args, kwargs))
    if kind in ("Add", "Subtract", "Average", "Multiply", "Divide", "TrueDivide"):
        operands = keras.tree.flatten((args, kwargs))
        rest = iter(inputs)
        values = [next(rest) if _is_float(operand) else None for operand in operands]
        terms = [
            [] if np.ndim(operand) == 0 and value is None else [spread(value, tuple(operand.shape), shape)]
            for operand, value in zip(operands, values, strict=True)
        ]
        if kind in ("Add", "Subtract", "Average"):
            return sum_of(*terms)
        factors = [factor for term in terms for factor in term]
        if kind != "Multiply":
            factors[1:] = [factor._replace(linear=False) for factor in factors[1:]]
        return sum_of(factors)
    if kind == "Dense":
        x = Operand(inputs[0], {axis: axis for axis in range(last)})
        return sum_of([x, along("kernel", {last: 1})], *bias("bias", last))
    if kind == "Embedding":
        return sum_of([along("embeddings", {last: 1})])
    if kind == "EinsumDense":
        return _einsum_rule(layer, inputs[0], leaves, output)
    if kind in ("MultiHeadAttention", "GroupedQueryAttention"):
        kernel = layer._output_dense.kernel
        return sum_of([along("_output_dense.kernel", {last: len(kernel.shape) - 1})], *bias("_output_dense.bias", last))
    if kind in _CONVOLUTIONS and getattr(layer, "groups", 1) == 1:
        channel = last if layer.data_format == "channels_last" else 1
        rank = len(layer.kernel.shape)
        kernel_axis = rank - 2 if kind.endswith("Transpose") else rank - 1
        return sum_of([Operand(inputs[0], {0: 0}), along("kernel", {channel: kernel_axis})], *bias("bias", channel))
    if kind in ("GlobalAveragePooling1D", "GlobalAveragePooling2D", "GlobalAveragePooling3D"):
        source = len(inputs[0].shape) - 1 if layer.data_format == "channels_last" else 1
        channel = source if layer.keepdims else 1
        return sum_of([Operand(inputs[0], {0: 0, channel: source})])
    return None


def _einsum_rule(layer: Any, x: Value, leaves: dict[int, Value], output: Value) -> Rule:
    """The rule of an EinsumDense: its equation says along which axis of x or of the kernel a result's axis runs."""
    left, result = layer.equation.replace(" ", "").split("->")
    data, kernel = left.split(",")
    leading = len(output.shape) - len(result.replace("...", "")) if "..." in result else 0
    result, data = (letters.replace("...", "0123456789"[:leading]) for letters in (result, data))
    pairs = list(enumerate(result))
    factors = [
        Operand(x, {axis: data.index(letter) for axis, letter in pairs if letter in data}),
        Operand(leaves[id(layer.kernel)], {axis: kernel.index(letter) for axis, letter in pairs if letter in kernel}),
    ]
    if layer.bias is None:
        return sum_of(factors)
    return sum_of(factors, [spread(leaves[id(layer.bias)], tuple(layer.bias.shape), output.shape)])


def _move(operation: Any, args: Any, kwargs: Any, numbers: list[np.ndarray]) -> list[np.ndarray]:
    rest = iter(numbers)

    def number(leaf: Any) -> Any:
        return keras.ops.convert_to_tensor(next(rest).astype(np.int32)) if _is_float(leaf) else leaf

    args, kwargs = keras.tree.map_structure(number, (args, kwargs))
    return [_array(tensor).astype(np.int64) for tensor in keras.tree.flatten(operation(*args, **kwargs))]


def _apply(model: Any, plan: Plan | None, recognised: Norms, dtype: str | None = None) -> Any:
    """A clone of the model, in ``dtype`` if given, with the plan's RMSNorm layers and centred weights if given."""
    names = {id(layer): path for path, layer in _walk(model)}
    copies: dict[int, Any] = {}

    def copied(layer: Any) -> Any:  # once, also where a model and one within it share the layer
        if id(layer) not in copies:
            copies[id(layer)] = cloned(layer) if _is_graph(layer) else copy_of(layer)
        return copies[id(layer)]

    def cloned(graph: Any) -> Any:  # the argument ``recursive`` of Keras 3.6 reaches one level
        return keras.models.clone_model(graph, clone_function=copied)

    def copy_of(layer: Any) -> Any:
        if not isinstance(layer, keras.layers.Layer):
            return layer
        config = layer.get_config()
        if dtype is not None:
            config["dtype"] = dtype
        converted = plan is not None and names[id(layer)] in plan.converted
        if converted and names[id(layer)] not in recognised:
            return _rms_norm(layer, config["dtype"])
        copy = type(layer).from_config(config)
        if converted:
            BACKEND.become(copy, recognised[names[id(layer)]])
        copy.name = layer.name  # not in the config that Keras makes for a class without get_config
        return copy

    clone = cloned(model)
    if not clone.built:
        clone.build(model.input_shape)
    new = dict(_walk(clone))
    for path, layer in _walk(model):
        new[path].set_weights(layer.get_weights())
    for name, axes in plan.centred.items() if plan is not None else ():
        path, _, last = name.rpartition("/")
        variable = _get(new[path], last)
        value = _array(variable).astype(np.float64)
        variable.assign(value - value.mean(axis=tuple(axes), keepdims=True))
    return clone


def _rms_norm(layer: Any, dtype: Any) -> RMSNormalization:
    return RMSNormalization(
        layer.axis, layer.epsilon, scale=layer.scale, bias=layer.center, name=layer.name, dtype=dtype,
        trainable=layer.trainable, scale_initializer=layer.gamma_initializer, bias_initializer=layer.beta_initializer,
        scale_regularizer=layer.gamma_regularizer, bias_regularizer=layer.beta_regularizer,
        scale_constraint=layer.gamma_constraint, bias_constraint=layer.beta_constraint,
    )  # fmt: skip


def _walk(model: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for layer in model.layers:
        name = f"{path}/{layer.name}".lstrip("/")
        if _is_graph(layer):
            yield from _walk(layer, name)
        elif not isinstance(layer, keras.layers.InputLayer):  # its name differs in a clone
            yield name, layer


def _is_graph(model: Any) -> bool:
    kinds = (keras.Sequential, _functional())
    return isinstance(model, kinds) and any(type(model).call is kind.call for kind in kinds)


@cache
def _functional() -> Any:
    """The class of keras.Model(inputs, outputs), which has no public name."""
    x = keras.Input((1,), name="x")  # by a name, as Keras numbers what has none
    return type(keras.Model(x, keras.layers.Identity(name="y")(x), name="model"))


def _run_graph(model: Any, call: Callable[[Any], Any], inputs: Any) -> Any:
    graph = model._functional if isinstance(model, keras.Sequential) else model
    outputs = graph._run_through_graph(inputs, operation_fn=call)
    return outputs[0] if isinstance(outputs, (list, tuple)) and len(outputs) == 1 else outputs


def _evaluate(model: Any, *inputs: Any, **_: Any) -> Any:
    """The outputs of a model without casts between floating dtypes; the same for the models inside it."""

    def call(layer: Any) -> Any:
        if _is_graph(layer):
            return partial(_evaluate, layer)
        is_layer = isinstance(layer, keras.layers.Layer)  # which may have any class
        if not is_layer and type(layer).__name__ == "Cast" and keras.backend.is_float_dtype(layer.dtype):
            return lambda x: x if _is_float(x) else layer(x)
        return layer

    return _run_graph(model, call, keras.tree.map_structure(keras.ops.convert_to_tensor, inputs))


def _get(layer: Any, name: str) -> Any:
    try:
        return attrgetter(name)(layer)
    except AttributeError:
        return None


def _is_float(value: Any) -> bool:
    return keras.ops.is_tensor(value) and keras.backend.is_float_dtype(keras.backend.standardize_dtype(value.dtype))
