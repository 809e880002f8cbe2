"""Layers of any framework as targets: their parameters become arguments, and nothing is written."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from rmsnorm.targets.bridges import bridge
from rmsnorm.targets.names import assign, assigned, inputs_of, renamed
from rmsnorm.targets.target import NoTarget, Shape, Target

Opener = Callable[[Any, str, str], Target]
_UNNAMED: Final = re.compile(r"variable(_\d+)?")


def opener(thing: Any) -> Opener | None:
    """What opens a layer or its class, as (layer, name, device) -> target; None where it is no layer."""
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


def _torch(layer: Any, name: str, device: str) -> Target:
    import torch

    if isinstance(layer, torch.jit.ScriptModule):
        raise NoTarget(f"{name} is a scripted module, expected the layer itself; pass it before torch.jit does")
    if any(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers())):
        raise NoTarget(f"{name} is on the device meta, expected {device}, where x is; load its values first")
    layer = layer.to(device)
    shapes = {key: tuple(p.shape) for key, p in layer.named_parameters()}
    if not assign(shapes):  # a gain that does not learn is a buffer
        shapes |= {key: tuple(p.shape) for key, p in layer.named_buffers() if p.is_floating_point()}
    own, inputs = assign(shapes), inputs_of(layer.forward)
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


def open_keras(layer: Any, name: str, device: str, change: Callable[[Any], None] = lambda fresh: None) -> Target:
    """A Keras layer: new ones are built from its config, for each shape and policy, and changed by ``change``."""
    config = layer.get_config()
    inputs = {argument: key for argument, key in inputs_of(layer.call).items() if argument != "mask"}
    options: dict[str, bool] = {}  # of every call

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

    own = assigned(shapes, _rank(config), (4, 4, 8), (4, 4, 4, 8))
    return Target(
        name, "keras", bridge(keras_library(), device), call, (*own, *inputs), names=own,
        width=_own_width(shapes, _rank(config), own),
        training=_training(options) if "training" in inspect.signature(layer.call).parameters else None,
        shape_of=lambda argument, shape: shapes(shape)[assign(shapes(shape))[argument]],
    )  # fmt: skip


def _own_width(shapes: Callable[[Shape], Mapping[str, Shape]], shape: Shape, own: Mapping[str, str]) -> int | None:
    """The width of a layer whose gain has one size whatever x is; None where it follows x, or there is none."""
    with contextlib.suppress(Exception):  # a layer of somebody's may raise anything on x of these shapes
        (size,) = {shapes(tuple(factor * size for size in shape))[own["scale"]] for factor in (1, 2)}
        return math.prod(size)
    return None


def made_again(layer: Any, config: Mapping[str, Any], policy: Any) -> Any:
    """A new Keras layer, not built, from the config of one. Its class need not take what every layer has."""
    import keras

    kind, config = type(layer), {**config, "dtype": policy}
    taken = inspect.signature(kind.__init__).parameters
    is_general = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    makers = (keras.layers.Layer.from_config.__func__, keras.Model.from_config.__func__)
    if not is_general and kind.from_config.__func__ in makers:
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


def _nnx(layer: Any, name: str, device: str) -> Target:
    import jax
    from flax import nnx

    graph, state = nnx.split(layer)
    options: dict[str, bool] = {}
    graphs: dict[bool | None, Any] = {None: graph, True: _in_mode(layer, True), False: _in_mode(layer, False)}
    leaves = _flat(nnx.to_pure_dict(state))
    shapes = {key: tuple(np.shape(value)) for key, value in leaves.items() if np.ndim(value)}
    own, inputs = assign(shapes), inputs_of(layer.__call__)

    def call(arrays: Mapping[str, Any]) -> Any:
        fresh = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(fresh, _nested({**leaves, **renamed(arrays, own)}))
        return nnx.merge(graphs[options.get("training")], fresh)(arrays["x"], **renamed(arrays, inputs))

    width = int(np.prod(shapes[own["scale"]])) if "scale" in own else None
    return Target(
        name, "flax", bridge("jax", device), call, (*own, *inputs), width=width, names=own,
        training=_training(options) if graphs[True] != graphs[False] else None,
        shape_of=lambda argument, shape: shapes[own[argument]],
    )  # fmt: skip


def _training(options: dict[str, bool]) -> Callable[[bool], contextlib.AbstractContextManager[None]]:
    """The context in which the options of every call say whether the layer trains."""

    @contextlib.contextmanager
    def training(mode: bool) -> Iterator[None]:
        before = options.copy()
        options["training"] = mode
        try:
            yield
        finally:
            options.clear()
            options.update(before)

    return training


def _in_mode(layer: Any, training: bool) -> Any:
    """The graph of a layer that trains, or that does not."""
    from flax import nnx

    copy = nnx.clone(layer)
    if isinstance(copy, nnx.Module):
        (copy.train if training else copy.eval)()
    return nnx.split(copy)[0]


def _flat(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """The leaves by their path, with dots."""
    from flax.traverse_util import flatten_dict

    return {".".join(map(str, path)): leaf for path, leaf in flatten_dict(tree).items()}


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The tree that ``_flat`` made leaves of."""
    from flax.traverse_util import unflatten_dict

    nested: dict[str, Any] = unflatten_dict({tuple(path.split(".")): leaf for path, leaf in leaves.items()})
    return nested


def _linen(layer: Any, name: str, device: str) -> Target:
    import jax

    inputs = inputs_of(type(layer).__call__)

    def init(key: Any, x: Any) -> Any:
        return layer.init(key, x).get("params", {})

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
        return layer.apply({"params": _nested(parameters)}, x, **renamed(arrays, inputs))

    own = assigned(shapes, (4, 4, 4, 8), (4, 8), (4, 4, 8))
    return Target(
        name, "flax", bridge("jax", device), call, (*own, *inputs), names=own,
        shape_of=lambda argument, shape: shapes(shape)[assign(shapes(shape))[argument]],
    )  # fmt: skip


# by the public name of the base class of all layers: a framework is recognised without importing it
_OPENERS: Final[dict[tuple[str, str], Opener]] = {
    ("torch.nn", "Module"): _torch,
    ("keras", "Layer"): open_keras,
    ("flax.nnx", "Pytree"): _nnx,
    ("flax.nnx", "Module"): _nnx,  # in versions without Pytree
    ("flax.linen", "Module"): _linen,
}
