"""Replaces LayerNorm by RMSNorm in Flax NNX. The jaxpr of the model on sample inputs is the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import jax
import numpy as np
from flax import nnx
from jax import numpy as jnp

from rmsnorm.conversion.layer_norm.convert import Model, Norms, Trace
from rmsnorm.conversion.layer_norm.streams import Node, Operand, Plan, Rule, Value, moved, spread, sum_of
from rmsnorm.conversion.replacement.flax import BACKEND, is_float, iter_modules
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.flax_impl.layers import RMSNorm
from rmsnorm.flax_impl.private import Literal, Primitive, batching, bind_equation, enable_x64, mlir
from rmsnorm.identify import Target, open_target
from rmsnorm.specification.variants import derive

_INLINE: Final = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
_SAME: Final = {"convert_element_type", "copy", "neg", "optimization_barrier", "reduce_precision", "stop_gradient"}
_MOVES: Final = {
    "broadcast_in_dim", "concatenate", "dynamic_slice", "expand_dims", "gather", "reshape", "rev", "slice", "split",
    "squeeze", "transpose",
}  # fmt: skip


class SampledModel(Model):
    """A module of Flax NNX, which is cloned.

    Example:
        >>> from rmsnorm.conversion import to_rms_norm
        >>> rngs = nnx.Rngs(0)
        >>> model = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.LayerNorm(4, rngs=rngs), nnx.relu)
        >>> print(to_rms_norm(model, jnp.ones((2, 3))).layers[0])
        layers/1 (LayerNorm): now RMSNorm; eps 1e-06, centred layers/0/bias, layers/0/kernel
    """

    backend = BACKEND

    def layers(self) -> list[tuple[str, nnx.Module]]:
        return list(BACKEND.modules(self.model))

    def opened(self, layer: nnx.Module) -> Target:
        return open_target(nnx.clone(layer))

    def trace(self, recognised: Norms) -> Trace:
        return _Trace(self.model, self.inputs, self.options, recognised)

    def changed(self, plan: Plan | None, recognised: Norms, *, wide: bool) -> tuple[nnx.Module, list[str]]:
        result = _wide(self.model) if wide else nnx.clone(self.model)
        if plan is not None:
            _apply(result, plan, recognised)
        return result, []

    def outputs(self, model: nnx.Module, *, wide: bool) -> list[np.ndarray]:
        sample = self.inputs, self.options
        inputs, options = jax.tree.map(_widen, sample) if wide else sample
        clone: Any = nnx.clone(model)
        clone.eval()
        return [np.asarray(array) for array in jax.tree.leaves(clone(*inputs, **options))]

    @contextlib.contextmanager
    def wide(self) -> Iterator[None]:
        with enable_x64(True), jax.numpy_dtype_promotion("standard"):
            yield


# Each call of LayerNorm or dropout is one operation of the jaxpr. Without these primitives the jaxpr would have
# LayerNorm as several operations, and dropout not at all.
_norm_p: Final = Primitive("layer_norm")
_dropout_p: Final = Primitive("dropout")


def _define(primitive: Primitive, compute: Any) -> None:
    """Defines the primitive by the function that computes it, which also replaces it within a scan or vmap."""

    def batched(arrays: Any, axes: Any, **params: Any) -> tuple[Any, int]:
        return jax.vmap(partial(compute, **params), in_axes=axes)(*arrays), 0

    def abstract(*avals: Any, **params: Any) -> Any:
        result = jax.eval_shape(partial(compute, **params), *avals)
        return jax.core.ShapedArray(result.shape, result.dtype)

    primitive.def_impl(compute)
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=False))
    batching.primitive_batchers[primitive] = batched


_define(_norm_p, lambda x, *parameters, module: module.call(x, *parameters))
_define(_dropout_p, lambda x, path: x)


class _Call:
    """The LayerNorm at a path, as a function of its parameters. It is hashed by identity, as jax requires a hash."""

    def __init__(self, path: str, layer: Any, recognised: Norm | None) -> None:
        self.path, self.kind = path, type(layer)
        self.graphdef, self.state = nnx.split(layer)
        self.x = "x" if recognised is None else recognised.x
        self.more = ""  # what else it is called with
        self.axes, self.axis_name, self.same_axes = [-1], None, True
        names = ("scale", "bias") if recognised is None else (recognised.scale, recognised.bias)
        pairs = zip(("scale", "bias"), names, strict=True)
        self.names = {parameter: name for parameter, name in pairs if name and getattr(layer, name) is not None}
        if recognised is None:
            axes, self.axis_name = layer.reduction_axes, layer.axis_name
            self.axes = [axes] if isinstance(axes, int) else list(axes)
            self.same_axes = layer.feature_axes == layer.reduction_axes

    def call(self, x: Any, *parameters: Any) -> Any:
        layer = nnx.merge(self.graphdef, self.state)
        for name, value in zip(self.names.values(), parameters, strict=True):
            setattr(layer, name, nnx.Param(value))
        return self.kind.__call__(layer, x)


def _marked(kind: Any) -> Any:
    """A class whose call is one operation of the jaxpr; with more than x it is that of ``kind``."""

    def __call__(self: Any, *inputs: Any, **named: Any) -> Any:
        named = {name: value for name, value in named.items() if value is not None}
        if len(inputs) + len(named) != 1 or not (inputs or self.marked.x in named):
            self.marked.more = "a mask" if "mask" in named else "more than x"
            return kind.__call__(self, *inputs, **named)
        x = inputs[0] if inputs else named[self.marked.x]
        parameters = [getattr(self, name)[...] for name in self.marked.names.values()]
        return _norm_p.bind(x, *parameters, module=self.marked)

    return type(kind)(kind.__name__, (kind,), {"__call__": __call__, "__module__": kind.__module__})


class _Dropout(nnx.Dropout):
    def __call__(self, inputs: Any, *_: Any, **__: Any) -> Any:
        return _dropout_p.bind(inputs, path=self.marked)


class _Trace(Trace):
    """The graph of a run in evaluation mode on the sample inputs: every operation of the jaxpr."""

    fetched = staticmethod(np.asarray)

    def __init__(self, model: nnx.Module, inputs: Any, options: Any, recognised: Norms) -> None:
        super().__init__()
        marked = nnx.clone(model)
        marked.eval()
        for path, module in list(iter_modules(marked)):
            name = _name(path)
            self._mark(name, module, recognised.get(name))
        graphdef, state = nnx.split(marked)
        flat = nnx.to_flat_state(state)
        leaves, treedef = jax.tree.flatten((inputs, options))
        sample = [leaf if isinstance(leaf, (jax.Array, np.ndarray)) else None for leaf in leaves]

        def call(weights: Sequence[Any], sample: Sequence[Any]) -> Any:
            variables = [(path, variable.replace(value)) for (path, variable), value in zip(flat, weights, strict=True)]
            arguments = [leaf if array is None else array for leaf, array in zip(leaves, sample, strict=True)]
            args, kwargs = jax.tree.unflatten(treedef, arguments)
            return nnx.merge(graphdef, nnx.from_flat_state(variables))(*args, **kwargs)

        weights = [variable[...] for _, variable in flat]
        closed = jax.make_jaxpr(call)(weights, sample)
        arguments = [
            (array, self._leaf(path, variable, array)) for (path, variable), array in zip(flat, weights, strict=True)
        ]
        for array in (jnp.asarray(array) for array in sample if array is not None):
            arguments.append((array, Value(array.shape, "the model's input", obstacle="has a mean of its own")))
        for _, value in self._run(closed.jaxpr, closed.consts, arguments):
            if value is not None:
                value.is_output = True
        reached = {node.norm.layer for node in self.nodes if node.norm}
        for path, module in iter_modules(marked):
            name = _name(path)
            norm = getattr(module, "marked", None)
            if isinstance(norm, _Call) and norm.more:
                self.obstacles[name] = f"it is called with {norm.more}"
            elif isinstance(norm, _Call) and name not in reached:
                self.obstacles.setdefault(name, "the sample inputs do not reach it, or only within a scan or vmap")

    def _leaf(self, path: Sequence[Any], variable: Any, array: Any) -> Value | None:
        name = _name(path)
        if not is_float(array):
            return None
        if not isinstance(variable, nnx.Param):
            return Value(array.shape, name, obstacle=f"is a {type(variable).__name__}")
        if array.dtype.itemsize < 4:
            self.coarse[name] = array.dtype.name
        return Value(array.shape, name, parameter=name)

    def _mark(self, path: str, module: Any, recognised: Norm | None) -> None:
        if type(module) is nnx.LayerNorm or recognised is not None:
            call = _Call(path, module, recognised)
            module.__class__ = _marked(type(module))
            module.marked = call
            if call.axis_name is not None:
                self.obstacles[path] = "its rows are spread over devices"
        elif isinstance(module, nnx.LayerNorm):
            self.obstacles[path] = f"it is {type(module).__name__}, not flax.nnx.LayerNorm"
        elif type(module) is nnx.Dropout and module.rate > 0:
            module.marked = path
            module.__class__ = _Dropout

    def _run(self, jaxpr: Any, consts: Any, arguments: Any) -> list[tuple[Any, Value | None]]:
        env = dict(zip(jaxpr.invars, arguments, strict=True))
        for variable, array in zip(jaxpr.constvars, consts, strict=True):
            env[variable] = (array, Value(variable.aval.shape, "a constant", obstacle="is no parameter"))

        def read(atom: Any) -> tuple[Any, Value | None]:
            return (atom.val, None) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if eqn.primitive.name in _INLINE and inner is not None:
                consts = getattr(inner, "consts", [])
                results = self._run(getattr(inner, "jaxpr", inner), consts, operands)
            else:
                results = self._bind(eqn, operands)
            env |= dict(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _bind(self, eqn: Any, operands: Sequence[tuple[Any, Value | None]]) -> list[tuple[Any, Value | None]]:
        name = eqn.primitive.name
        out = bind_equation(eqn, *(array for array, _ in operands))
        arrays = list(out) if eqn.primitive.multiple_results else [out]
        values = [Value(variable.aval.shape) if is_float(variable.aval) else None for variable in eqn.outvars]
        inputs = [value for _, value in operands if value is not None]
        outputs = [value for value in values if value is not None]
        if eqn.primitive is _norm_p:
            call = eqn.params["module"]
            parameters = dict(zip(call.names, operands[1:], strict=True))
            (scale, _), (bias, leaf) = (parameters.get(name, (None, None)) for name in ("scale", "bias"))
            norm = self._norm(call.path, call.axes, operands[0][0].shape, scale, bias, leaf)
            norm = norm._replace(constant=norm.constant and call.same_axes)
            self.nodes.append(Node(f"LayerNorm {call.path}", inputs, outputs, norm=norm))
        else:
            if eqn.primitive is _dropout_p:
                self.dropouts.append((eqn.params["path"], inputs[0]))
            rule = _rule(eqn, operands, inputs, outputs[0]) if outputs else None
            self.nodes.append(Node(f"jax {name}", inputs, outputs, rule))
        return list(zip(arrays, values, strict=True))


def _rule(
    eqn: Any, operands: Sequence[tuple[Any, Value | None]], inputs: Sequence[Value], output: Value
) -> Rule | None:
    """The rule of a primitive; None if it is not linear."""
    name, shape, params = eqn.primitive.name, output.shape, eqn.params
    arrays, values = [array for array, _ in operands], [value for _, value in operands]
    broadcast = [spread(value, np.shape(array), shape) for array, value in operands]
    if name in _SAME or eqn.primitive is _dropout_p:
        return sum_of(broadcast)
    if name in _MOVES:
        return moved(inputs, partial(_move, eqn, operands))
    if name in ("add", "add_any", "sub"):
        return sum_of(*([term] for term in broadcast))
    if name == "mul":
        return sum_of(broadcast)
    if name == "div":
        return sum_of([broadcast[0], broadcast[1]._replace(linear=False)])
    if name == "reduce_sum":
        remaining = [axis for axis in range(arrays[0].ndim) if axis not in params["axes"]]
        return sum_of([Operand(values[0], dict(enumerate(remaining)))])
    if name == "dot_general":
        contracting, batch = params["dimension_numbers"]
        factors, start = [], len(batch[0])
        for array, value, summed, batched in zip(arrays, values, contracting, batch, strict=True):
            free = [axis for axis in range(array.ndim) if axis not in (*summed, *batched)]
            factors.append(Operand(value, dict(enumerate(batched)) | dict(enumerate(free, start))))
            start += len(free)
        return sum_of(factors)
    if name == "conv_general_dilated" and params["feature_group_count"] == params["batch_group_count"] == 1:
        lhs, rhs, out = params["dimension_numbers"]
        return sum_of([Operand(values[0], {out[0]: lhs[0]}), Operand(values[1], {out[1]: rhs[0]})])
    return None


def _move(eqn: Any, operands: Sequence[tuple[Any, Value | None]], numbers: list[np.ndarray]) -> list[np.ndarray]:
    rest = iter(numbers)
    arrays = [array if value is None else jnp.asarray(next(rest), jnp.int32) for array, value in operands]
    params = {**eqn.params, "fill_value": -1} if "fill_value" in eqn.params else eqn.params
    out = eqn.primitive.bind(*arrays, **params)
    return [np.asarray(array, np.int64) for array in (out if eqn.primitive.multiple_results else [out])]


def _apply(model: nnx.Module, plan: Plan, recognised: Norms) -> None:
    """Centres the parameters of the plan and turns its layers into RMSNorm, in place."""
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if axes := plan.centred.get(_name(path)):
            array = variable[...]
            wide = np.asarray(array, np.float64)
            value = (wide - wide.mean(tuple(axes), keepdims=True)).astype(array.dtype)
            _get(model, path)[...] = jnp.asarray(value)
    for path, module in list(iter_modules(model)):
        name = _name(path)
        if name in plan.converted and name in recognised:
            BACKEND.become(module, recognised[name])
        elif name in plan.converted:
            layer: Any = module
            layer.variant = derive("to_rms_norm", "flax", layer.epsilon, None)
            layer.__class__ = RMSNorm


def _wide(model: nnx.Module) -> nnx.Module:
    """A clone that is float64 throughout."""
    graph, state = nnx.split(model)
    wide = nnx.merge(graph, jax.tree.map(_widen, state))
    for _, module in list(iter_modules(wide)):
        layer: Any = module
        if getattr(layer, "dtype", None) is not None:
            layer.dtype = jnp.float64
    return wide


def _widen(value: Any) -> Any:
    return jnp.asarray(value, jnp.float64) if isinstance(value, (jax.Array, np.ndarray)) and is_float(value) else value


def _name(path: Sequence[Any]) -> str:
    return "/".join(map(str, path))


def _get(model: Any, path: Sequence[Any]) -> Any:
    for key in path:
        model = getattr(model, key) if isinstance(key, str) and hasattr(model, key) else model[key]
    return model
