"""LayerNorm into RMSNorm in Keras: the graph of layers and operations of a functional or Sequential model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final

import keras
import numpy as np

from rmsnorm import errors
from rmsnorm.conversion.layer_norm.conversion import (
    BOUND,
    BOUND_OF_FLOAT32,
    Conversion,
    Layer,
    difference,
    proved,
    some,
)
from rmsnorm.conversion.layer_norm.streams import Node, Norm, Operand, Plan, Rule, Value, moved, plan, spread, sum_of
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


def to_rms_norm(model: Any, *inputs: Any, **options: Any) -> Conversion:
    """A clone of a functional or Sequential model in which every LayerNormalization that can be is RMSNormalization.

    Args, raises: as ``rmsnorm.conversion.layer_norm.to_rms_norm``.

    Example:
        >>> keras.utils.set_random_seed(0)
        >>> layers = [keras.layers.Dense(4, name="dense"), keras.layers.LayerNormalization(name="norm")]
        >>> print(to_rms_norm(keras.Sequential(layers), np.ones((2, 3), "float32")).layers[0])
        norm (LayerNormalization): now RMSNorm; eps 0.001, centred dense/bias, dense/kernel
    """
    if not _is_graph(model):
        want = "a functional or Sequential model, whose graph of layers is known"
        fix = "build it with keras.Model(inputs, outputs)"
        raise errors.out_of_domain("to_rms_norm", "the class of the model", type(model).__name__, want, fix)
    before = _outputs(model, inputs, options)  # which builds it, too
    trace = _Trace(model, inputs)
    found = plan(trace.nodes, trace.obstacles)
    result = _copy(model, found)
    layers = tuple(_layers(model, found))
    if not found.converted:
        return Conversion(result, layers, (), (), 0.0, 0.0)
    error = difference(before, _outputs(result, inputs, options))
    dtype, bound = ("float64", BOUND) if keras.backend.backend() == "tensorflow" else ("float32", BOUND_OF_FLOAT32)
    wide = [_evaluated(_copy(model, each, dtype), *inputs) for each in (None, found)]
    exact = proved(difference(*([*map(_array, keras.tree.flatten(each))] for each in wide)), bound)
    names = tuple(sorted(found.centred))
    return Conversion(result, layers, names, tuple(trace.notes(found)), exact, error)


class _Trace:
    """A run of the graph on sample inputs, with what each operation is."""

    def __init__(self, model: Any, inputs: Any) -> None:
        self.nodes: list[Node] = []
        self.obstacles: dict[str, str] = {}
        self._paths: dict[int, str] = {}
        self._leaves: dict[int, Value] = {}
        self._values: dict[int, Value] = {}
        self._held: list[Any] = []  # so that no id comes again
        self._dropouts: list[tuple[str, Value]] = []
        self._coarse: dict[str, list[str]] = defaultdict(list)
        tensors = [keras.ops.convert_to_tensor(each) for each in keras.tree.flatten(inputs)]
        for tensor in tensors:
            self._enter(tensor, Value(tuple(tensor.shape), "the model's input", obstacle="has a mean of its own"))
        for tensor in keras.tree.flatten(self._run(model, "", *tensors)):
            if _is_float(tensor):
                self._value(tensor).is_output = True

    def notes(self, found: Plan) -> Iterator[str]:
        names = [name for name, value in self._dropouts if value in found.values]
        if names:
            yield f"dropout in {some(names)}: what it leaves is not centred; the models agree in evaluation only"
        for dtype, keys in self._coarse.items():
            names = [name for name in keys if name in found.centred]
            if names:
                yield f"{some(names)}: rounded to {dtype} once more"

    def _run(self, model: Any, path: str, *inputs: Any) -> Any:
        return _through(model, lambda each: partial(self._call, path, each), inputs)

    def _call(self, path: str, operation: Any, *args: Any, **kwargs: Any) -> Any:
        path = self._paths.setdefault(id(operation), f"{path}/{operation.name}".lstrip("/"))
        if _is_graph(operation):
            return self._run(operation, path, *args)
        given = [each for each in keras.tree.flatten((args, kwargs)) if _is_float(each)]
        inputs = [self._value(each) for each in given]
        out = operation(*args, **kwargs)
        if type(operation).__name__ in _SAME and (_get(operation, "rate") or _get(operation, "stddev")):
            self._dropouts.append((path, inputs[0]))
        results = [each for each in keras.tree.flatten(out) if _is_float(each)]
        if results and all(any(each is one for one in given) for each in results):
            return out
        outputs = [Value(tuple(each.shape)) for each in results]
        leaves = {id(each): self._leaf(path, operation, each) for each in getattr(operation, "weights", [])}
        node = Node(f"{path} ({type(operation).__name__})", [*inputs, *leaves.values()], outputs)
        if type(operation) is keras.layers.LayerNormalization:
            node.norm = _norm(path, operation, leaves, args[0])
            if operation.rms_scaling:
                self.obstacles[path] = "with rms_scaling it divides by the variance"
        elif outputs:
            node.rule = _rule(operation, args, kwargs, inputs, leaves, outputs[0])
            self._look(path, operation)
        self.nodes.append(node)
        for tensor, value in zip(results, outputs, strict=True):
            self._enter(tensor, value)
        return out

    def _look(self, path: str, operation: Any) -> None:
        for layer in operation._flatten_layers() if isinstance(operation, keras.layers.Layer) else ():
            if isinstance(layer, keras.layers.LayerNormalization):
                name = path if layer is operation else f"{path}/{layer.name}"
                self.obstacles[name] = (
                    f"it is part of {path} ({type(operation).__name__}), which does not show its graph"
                )

    def _enter(self, tensor: Any, value: Value) -> None:
        self._held.append(tensor)
        self._values[id(tensor)] = value

    def _value(self, tensor: Any) -> Value:
        if id(tensor) not in self._values:
            self._enter(tensor, Value(tuple(tensor.shape), "a constant", obstacle="is no parameter"))
        return self._values[id(tensor)]

    def _leaf(self, path: str, layer: Any, variable: Any) -> Value:
        if id(variable) not in self._leaves:
            held = [name for name in _WEIGHTS if variable is _get(layer, name)]
            name = f"{path}/{held[0] if held else variable.name}"
            self._leaves[id(variable)] = Value(
                tuple(variable.shape), name, name if held else None, "is no weight that is known"
            )
            if np.dtype(variable.numpy().dtype).itemsize < 4:
                self._coarse[variable.dtype].append(name)
        return self._leaves[id(variable)]


_WEIGHTS: Final = ("kernel", "bias", "embeddings", "_output_dense.kernel", "_output_dense.bias", "beta")


def _get(layer: Any, name: str) -> Any:
    try:
        return attrgetter(name)(layer)
    except AttributeError:
        return None


def _norm(path: str, layer: Any, leaves: dict[int, Value], x: Any) -> Norm:
    axes = layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]
    gamma, beta = layer.gamma, layer.beta
    constant = gamma is None or bool((_array(gamma) == _array(gamma).flat[0]).all())
    centred = beta is None or float(_array(beta).astype(np.float64).mean()) == 0
    normalized = frozenset(axis % len(x.shape) for axis in axes if x.shape[axis] > 1)
    return Norm(path, normalized, constant, None if beta is None else leaves[id(beta)], centred)


def _rule(
    layer: Any, args: Any, kwargs: Any, inputs: Sequence[Value], leaves: dict[int, Value], output: Value
) -> Rule | None:
    """How a layer or an operation of Keras is linear, if it is."""
    kind, shape, last = type(layer).__name__, output.shape, len(output.shape) - 1
    if not type(layer).__module__.startswith("keras.src."):
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
        tensors = iter(inputs)
        held = [next(tensors) if _is_float(each) else None for each in operands]
        terms = [
            [] if np.ndim(each) == 0 and value is None else [spread(value, tuple(each.shape), shape)]
            for each, value in zip(operands, held, strict=True)
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
        out = rank - 2 if kind.endswith("Transpose") else rank - 1
        return sum_of([Operand(inputs[0], {0: 0}), along("kernel", {channel: out})], *bias("bias", channel))
    if kind in ("GlobalAveragePooling1D", "GlobalAveragePooling2D", "GlobalAveragePooling3D"):
        source = len(inputs[0].shape) - 1 if layer.data_format == "channels_last" else 1
        channel = source if layer.keepdims else 1
        return sum_of([Operand(inputs[0], {0: 0, channel: source})])
    return None


_CONVOLUTIONS: Final = {f"Conv{rank}D{kind}" for rank in (1, 2, 3) for kind in ("", "Transpose")}


def _einsum_rule(layer: Any, x: Value, leaves: dict[int, Value], output: Value) -> Rule:
    """Each axis of the result runs along one of x or of the kernel, which the equation names."""
    left, result = layer.equation.replace(" ", "").split("->")
    given, kernel = left.split(",")
    lead = len(output.shape) - len(result.replace("...", "")) if "..." in result else 0
    result, given = (letters.replace("...", "0123456789"[:lead]) for letters in (result, given))
    pairs = list(enumerate(result))
    factors = [
        Operand(x, {axis: given.index(letter) for axis, letter in pairs if letter in given}),
        Operand(leaves[id(layer.kernel)], {axis: kernel.index(letter) for axis, letter in pairs if letter in kernel}),
    ]
    if layer.bias is None:
        return sum_of(factors)
    return sum_of(factors, [spread(leaves[id(layer.bias)], tuple(layer.bias.shape), output.shape)])


def _move(operation: Any, args: Any, kwargs: Any, numbers: list[np.ndarray]) -> list[np.ndarray]:
    rest = iter(numbers)

    def number(each: Any) -> Any:
        return keras.ops.convert_to_tensor(next(rest).astype(np.int32)) if _is_float(each) else each

    args, kwargs = keras.tree.map_structure(number, (args, kwargs))
    return [_array(each).astype(np.int64) for each in keras.tree.flatten(operation(*args, **kwargs))]


def _copy(model: Any, found: Plan | None, dtype: str | None = None) -> Any:
    """A clone with the model's weights, or with those of the plan and its layers, in its dtypes or another."""
    names = {id(layer): path for path, layer in _walk(model)}

    def copied(layer: Any) -> Any:
        if not isinstance(layer, keras.layers.Layer):
            return layer
        config = layer.get_config()
        if dtype is not None:
            config["dtype"] = dtype
        if found is not None and names[id(layer)] in found.converted:
            return _rms_norm(layer, config["dtype"])
        copy = type(layer).from_config(config)
        copy.name = layer.name  # which the config lacks where Keras made it up for a class without get_config
        return copy

    clone = keras.models.clone_model(model, clone_function=copied, recursive=True)
    if not clone.built:
        clone.build(model.input_shape)
    new = dict(_walk(clone))
    for path, layer in _walk(model):
        new[path].set_weights(layer.get_weights())
    for name, axes in found.centred.items() if found is not None else ():
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
        elif not isinstance(layer, keras.layers.InputLayer):  # which a clone names anew
            yield name, layer


def _layers(model: Any, found: Plan) -> Iterator[Layer]:
    for path, layer in _walk(model):
        if path in found.converted:
            names = some(sorted(found.converted[path]))
            yield Layer(path, type(layer).__name__, True, f"eps {layer.epsilon}, centred {names or 'nothing'}")
        for name in found.left:
            if name == path or name.startswith(f"{path}/"):
                yield Layer(name, "LayerNormalization", False, found.left[name])


def _is_graph(model: Any) -> bool:
    kinds = (keras.Sequential, keras.src.models.functional.Functional)
    return isinstance(model, kinds) and any(type(model).call is kind.call for kind in kinds)


def _through(model: Any, call: Callable[[Any], Any], inputs: Any) -> Any:
    graph = model._functional if isinstance(model, keras.Sequential) else model
    outputs = graph._run_through_graph(inputs, operation_fn=call)
    return outputs[0] if isinstance(outputs, (list, tuple)) and len(outputs) == 1 else outputs


def _evaluated(model: Any, *inputs: Any, **_: Any) -> Any:
    """What a model gives without the casts to the dtypes of its inputs, and of those of models in it."""
    inputs = keras.tree.map_structure(keras.ops.convert_to_tensor, inputs)
    return _through(model, lambda each: partial(_evaluated, each) if _is_graph(each) else each, inputs)


def _outputs(model: Any, inputs: Any, options: Any) -> list[np.ndarray]:
    return [_array(each) for each in keras.tree.flatten(model(*inputs, **options, training=False))]


def _array(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.numpy() if isinstance(tensor, keras.Variable) else keras.ops.convert_to_numpy(tensor))


def _is_float(value: Any) -> bool:
    return keras.ops.is_tensor(value) and keras.backend.is_float_dtype(keras.backend.standardize_dtype(value.dtype))
