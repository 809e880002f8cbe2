"""Layers of any framework as targets: their parameters become arguments, and nothing is written."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from rmsnorm.targets.bridges import bridge
from rmsnorm.targets.names import Others, assign, assigned, inputs_of, renamed
from rmsnorm.targets.target import NoTarget, Shape, Target

Opener = Callable[[Any, str, str, Others], Target]
_UNNAMED: Final = re.compile(r"variable(_\d+)?")


def opener(thing: Any) -> Opener | None:
    """What opens a layer or its class, as (layer, name, device, other inputs) -> target; None where it is no layer."""
    kind = thing if isinstance(thing, type) else type(thing)
    modules = ((getattr(sys.modules.get(module), name, None), opens) for (module, name), opens in _OPENERS.items())
    bases = {base: opens for base, opens in modules if isinstance(base, type)}
    return next((bases[base] for base in kind.__mro__ if base in bases), None)


def probed(layer: Any, name: str) -> Any:
    """What may be called, moved and written to in the place of a layer: a copy of a module of PyTorch.

    What opens a layer of another framework builds it anew, or merges its parts into new objects.
    """
    if opener(layer) is not _torch:
        return layer
    try:
        return copy.deepcopy(layer)
    except Exception as error:  # attributes may be anything
        what = str(error).strip().partition("\n")[0]
        raise NoTarget(
            f"{name} cannot be copied ({type(error).__name__}: {what}), expected a layer that copy.deepcopy "
            "copies, as calls may change it; pass its class, or a function that calls it"
        ) from error


def keras_library() -> str:
    """The library whose arrays Keras computes with."""
    import keras

    return str(keras.backend.backend())


def _torch(layer: Any, name: str, device: str, others: Others = ()) -> Target:
    import torch

    if isinstance(layer, torch.jit.ScriptModule):
        raise NoTarget(f"{name} is a scripted module, expected the layer itself; pass it before torch.jit does")
    if any(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers())):
        raise NoTarget(f"{name} is on the device meta, expected {device}, where x is; load its values first")
    layer = layer.to(device)
    shapes = {key: tuple(p.shape) for key, p in layer.named_parameters()}
    if not assign(shapes):  # a gain that does not learn is a buffer
        shapes |= {key: tuple(p.shape) for key, p in layer.named_buffers() if p.is_floating_point()}
    own, inputs = assign(shapes), inputs_of(layer.forward, others)
    size = shapes[own["scale"]] if "scale" in own else shapes.get(own.get("bias", ""), ())
    if math.prod(size) == 1:
        size = ()  # one number goes with any width
    fixed = size or getattr(layer, "normalized_shape", None)

    def call(arrays: Mapping[str, Any]) -> Any:
        return torch.func.functional_call(layer, renamed(arrays, own), (arrays["x"],), renamed(arrays, inputs))

    @contextlib.contextmanager
    def training(mode: bool) -> Iterator[None]:
        modes = [(module, module.training) for module in layer.modules()]
        layer.train(mode)
        try:
            yield
        finally:
            for module, own_mode in modes:
                module.training = own_mode

    return Target(
        name, "torch", bridge("torch", device), call, (*own, *inputs), names=own, training=training, probe=layer,
        width=int(np.prod(fixed)) if fixed else None,
        shape_of=lambda argument, shape: shapes[own[argument]],
    )  # fmt: skip


def open_keras(
    layer: Any, name: str, device: str, others: Others = (), change: Callable[[Any], None] = lambda fresh: None
) -> Target:
    """A Keras layer: new ones are built from its config, for each shape and policy, and changed by ``change``."""
    config = layer.get_config()
    inputs = {argument: key for argument, key in inputs_of(layer.call, others).items() if argument != "mask"}
    options: dict[str, bool] = {}  # of every call

    @contextlib.contextmanager
    def training(mode: bool) -> Iterator[None]:
        options["training"] = mode
        try:
            yield
        finally:
            options.clear()

    @functools.cache
    def built(shape: Shape, x: str, g: str) -> Any:
        import keras

        policy = x if x == g else f"mixed_{x}" if g == "float32" and x in ("float16", "bfloat16") else None
        if policy is None:
            raise TypeError(f"a Keras layer that computes in {x} has no {g} variables")
        fresh = made_again(layer, config, keras.DTypePolicy(policy))
        build(fresh, shape)
        change(fresh)
        return fresh

    def shapes(shape: Shape) -> dict[str, Shape]:
        return {name: tuple(v.shape) for name, v in _own_names(built(shape, "float32", "float32"))}

    def call(arrays: Mapping[str, Any]) -> Any:
        x = arrays["x"]
        shape = tuple(int(size) for size in x.shape)
        parameters = [arrays[argument] for argument in ("scale", "bias", "factor", "gate_vector") if argument in arrays]
        fresh = built(shape, dtype_of(x), dtype_of(parameters[0]) if parameters else dtype_of(x))
        chosen = renamed(arrays, assign(shapes(shape)))
        values = [chosen.get(name, v.value) for name, v in _own_names(fresh)]
        others = [v.value for v in fresh.non_trainable_variables]
        return fresh.stateless_call(values, others, x, **renamed(arrays, inputs), **options)[0]

    own, notes = assigned(shapes, _rank(config), (4, 4, 8), (4, 4, 4, 8))
    return Target(
        name, "keras", bridge(keras_library(), device), call, (*own, *inputs), names=own, notes=notes,
        training=training if "training" in inspect.signature(layer.call).parameters else None,
        shape_of=lambda argument, shape: shapes(shape)[assign(shapes(shape))[argument]],
    )  # fmt: skip


def made_again(layer: Any, config: Mapping[str, Any], policy: Any) -> Any:
    """A new Keras layer, not built, from the config of one. Its class need not take what every layer has."""
    import keras

    kind, config = type(layer), {**config, "dtype": policy}
    taken = inspect.signature(kind.__init__).parameters
    is_general = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    if not is_general and kind.from_config.__func__ is keras.layers.Layer.from_config.__func__:
        config = {name: value for name, value in config.items() if name in taken}
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)  # that of a layer that gets none
    try:
        return kind.from_config(config)
    finally:
        keras.config.set_dtype_policy(before)


def _own_names(layer: Any) -> list[tuple[str, Any]]:
    """The trainable variables of a Keras layer in their order, each with its name.

    One without a name of its own has a number instead, that of all such variables of the process, and so another one
    in each new layer. It goes by its attribute, or by its place.
    """
    attributes = {
        id(value): key
        for part in layer._flatten_layers()
        for key, value in vars(part).items()
        if hasattr(value, "shape")
    }
    return [
        (attributes.get(id(v), f"variable.{place}") if _UNNAMED.fullmatch(v.name) else v.name, v)
        for place, v in enumerate(layer.trainable_variables)
    ]


def build(layer: Any, shape: Sequence[int]) -> None:
    """Builds a Keras layer for x of a shape; a gate, if ``build`` asks for its shape, too, has the same one."""
    layer.build(*[shape] * max(1, len(inspect.signature(layer.build).parameters)))


def _rank(config: Mapping[str, Any]) -> Shape:
    """A shape of x with as many axes as the layer's axis asks for."""
    axis = config.get("axis", -1)
    axes = axis if isinstance(axis, (list, tuple)) else [axis]
    need = max((entry + 1 if entry >= 0 else -entry for entry in axes), default=1)
    return (4,) * (max(need, 2) - 1) + (8,)


def dtype_of(tensor: Any) -> str:
    """The name of a tensor's dtype, as NumPy has it."""
    name = getattr(tensor.dtype, "name", None) or str(tensor.dtype)
    return name.rsplit(".", 1)[-1]


def _nnx(layer: Any, name: str, device: str, others: Others = ()) -> Target:
    import jax
    from flax import nnx

    graph, state = nnx.split(layer)
    graphs = [graph]  # the last one is that of the next call
    modes = {mode: _in_mode(layer, mode) for mode in (True, False)}
    leaves = _flat(nnx.to_pure_dict(state))
    shapes = {key: tuple(np.shape(value)) for key, value in leaves.items() if np.ndim(value)}
    own, inputs = assign(shapes), inputs_of(layer.__call__, others)

    def call(arrays: Mapping[str, Any]) -> Any:
        fresh = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(fresh, _nested({**leaves, **renamed(arrays, own)}))
        return nnx.merge(graphs[-1], fresh)(arrays["x"], **renamed(arrays, inputs))

    @contextlib.contextmanager
    def training(mode: bool) -> Iterator[None]:
        graphs.append(modes[mode])
        try:
            yield
        finally:
            graphs.pop()

    width = int(np.prod(shapes[own["scale"]])) if "scale" in own else None
    return Target(
        name, "flax", bridge("jax", device), call, (*own, *inputs), width=width, names=own,
        training=training if modes[True] != modes[False] else None,
        shape_of=lambda argument, shape: shapes[own[argument]],
    )  # fmt: skip


def is_haiku(kind: Any) -> bool:
    """Whether that is a class of modules of Haiku."""
    return any((base.__module__, base.__name__) == ("haiku._src.module", "Module") for base in kind.__mro__)


def _in_mode(layer: Any, training: bool) -> Any:
    """The graph of a layer that trains, or that does not."""
    from flax import nnx

    copy = nnx.clone(layer)
    if isinstance(copy, nnx.Module):
        (copy.train if training else copy.eval)()
    return nnx.split(copy)[0]


def _flat(tree: Mapping[Any, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """The leaves by their path, with dots."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        inner = (*path, str(key))
        leaves |= _flat(value, inner) if isinstance(value, Mapping) else {".".join(inner): value}
    return leaves


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The tree that ``_flat`` made leaves of."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *folders, last = path.split(".")
        branch = tree
        for folder in folders:
            branch = branch.setdefault(folder, {})
        branch[last] = value
    return tree


def _linen(layer: Any, name: str, device: str, others: Others = ()) -> Target:
    return _pure(
        "flax", name, device, inputs_of(type(layer).__call__, others), (4, 4, 4, 8), (4, 8), (4, 4, 8),
        init=lambda key, x: layer.init(key, x).get("params", {}),
        apply=lambda parameters, x, **more: layer.apply({"params": parameters}, x, **more),
    )  # fmt: skip


def open_haiku(make: Callable[[], Any], name: str, device: str, others: Others = ()) -> Target:
    """A module of Haiku, which lives only inside of a function that hk.transform takes: ``make`` makes it there."""
    haiku: Any = importlib.import_module("haiku")
    pure = haiku.without_apply_rng(haiku.transform(lambda x, **more: make()(x, **more)))
    inputs = {argument: argument for argument in others}
    return _pure("haiku", name, device, inputs, (4, 8), (4, 4, 8), (4, 4, 4, 8), init=pure.init, apply=pure.apply)


def _pure(
    framework: str, name: str, device: str, inputs: Mapping[str, str], *tried: Shape, init: Callable[..., Any],
    apply: Callable[..., Any],
) -> Target:  # fmt: skip
    """A layer of JAX that is two functions: init(key, x) makes its parameters, apply(parameters, x, ...) is y.

    tried: shapes of x, of which it takes one.
    """
    import jax

    @functools.cache
    def shapes(shape: Shape) -> dict[str, Shape]:
        made = jax.eval_shape(init, jax.random.key(0), jax.ShapeDtypeStruct(shape, np.float32))
        return {key: tuple(leaf.shape) for key, leaf in _flat(made).items()}

    @functools.cache
    def initial(shape: Shape, dtype: str) -> dict[str, Any]:
        return _flat(init(jax.random.key(0), np.zeros(shape, dtype)))

    def call(arrays: Mapping[str, Any]) -> Any:
        x = arrays["x"]
        shape = tuple(x.shape)
        parameters = renamed(arrays, assign(shapes(shape)))
        if len(parameters) < len(shapes(shape)):
            parameters = {**initial(shape, dtype_of(x)), **parameters}
        return apply(_nested(parameters), x, **renamed(arrays, inputs))

    own, notes = assigned(shapes, *tried)
    return Target(
        name, framework, bridge("jax", device), call, (*own, *inputs), names=own, notes=notes,
        shape_of=lambda argument, shape: shapes(shape)[assign(shapes(shape))[argument]],
    )  # fmt: skip


def _equinox(layer: Any, name: str, device: str, others: Others = ()) -> Target:
    import jax

    leaves, tree = jax.tree_util.tree_flatten_with_path(layer)
    keys = [jax.tree_util.keystr(path).lstrip(".") for path, _ in leaves]
    shapes = {key: tuple(leaf.shape) for key, (_, leaf) in zip(keys, leaves, strict=True) if np.ndim(leaf)}
    own = assign(shapes)
    example = tuple(getattr(layer, "shape", None) or next(iter(shapes.values()), ()))

    def call(arrays: Mapping[str, Any]) -> Any:
        chosen = renamed(arrays, own)
        values = [chosen.get(key, leaf) for key, (_, leaf) in zip(keys, leaves, strict=True)]
        function = jax.tree_util.tree_unflatten(tree, values)
        more = {name: arrays[name] for name in others}
        call = functools.partial(function, **more)
        for _ in range(arrays["x"].ndim - max(1, len(example))):
            call = jax.vmap(call)  # an Equinox layer takes one example
        return call(arrays["x"])

    return Target(
        name, "equinox", bridge("jax", device), call, tuple(own), width=int(np.prod(example)) if example else None,
        shape_of=lambda argument, shape: shapes[own[argument]],
    )  # fmt: skip


def _tf_module(layer: Any, name: str, device: str, others: Others = ()) -> Target:
    """A tf.Module, as those of Sonnet: tensors take the place of the variables among its attributes."""
    import tensorflow as tf

    inputs = inputs_of(layer.__call__, others)

    @functools.cache
    def built(width: int) -> Any:
        """A copy; a module may make its variables in its first call, for the width of that x."""
        fresh = copy.deepcopy(layer)
        fresh(tf.zeros((2, width)))
        return fresh

    def variables(width: int) -> dict[str, Any]:
        return {key: value for key, value in vars(built(width)).items() if isinstance(value, tf.Variable)}

    made = {key: tuple(value.shape) for key, value in vars(layer).items() if isinstance(value, tf.Variable)}
    example = math.prod(next(iter(made.values()))) if made else None
    own, notes = assigned(lambda shape: made or {k: tuple(v.shape) for k, v in variables(shape[-1]).items()}, (2, 8))

    def call(arrays: Mapping[str, Any]) -> Any:
        fresh = copy.copy(built(int(arrays["x"].shape[-1])))
        vars(fresh).update(renamed(arrays, own))
        return fresh(arrays["x"], **renamed(arrays, inputs))

    return Target(
        name, "tensorflow", bridge("tensorflow", device), call, (*own, *inputs), width=example, names=own,
        notes=notes,
        shape_of=lambda argument, shape: tuple(variables(shape[-1])[own[argument]].shape),
    )  # fmt: skip


def _mlx(layer: Any, name: str, device: str, others: Others = ()) -> Target:
    fresh, initial = copy.deepcopy(layer), _flat(layer.parameters())
    shapes = {key: tuple(value.shape) for key, value in initial.items()}
    own, inputs = assign(shapes), inputs_of(type(layer).__call__, others)

    def call(arrays: Mapping[str, Any]) -> Any:
        fresh.update(_nested({**initial, **renamed(arrays, own)}))
        try:
            return fresh(arrays["x"], **renamed(arrays, inputs))
        finally:
            fresh.update(_nested(initial))

    @contextlib.contextmanager
    def training(mode: bool) -> Iterator[None]:
        before = fresh.training
        fresh.train(mode)
        try:
            yield
        finally:
            fresh.train(before)

    size = shapes[own["scale"]] if "scale" in own else ()
    return Target(
        name, "mlx", bridge("mlx", device), call, (*own, *inputs), names=own, training=training,
        width=math.prod(size) if math.prod(size) > 1 else getattr(layer, "dims", None),
        shape_of=lambda argument, shape: shapes[own[argument]],
    )  # fmt: skip


# by the public name of the base class of all layers: a framework is recognised without importing it
_OPENERS: Final[dict[tuple[str, str], Opener]] = {
    ("torch.nn", "Module"): _torch,
    ("keras", "Layer"): open_keras,
    ("flax.nnx", "Pytree"): _nnx,
    ("flax.nnx", "Module"): _nnx,  # in versions without Pytree
    ("flax.linen", "Module"): _linen,
    ("equinox", "Module"): _equinox,
    ("tensorflow", "Module"): _tf_module,
    ("mlx.nn", "Module"): _mlx,
}
