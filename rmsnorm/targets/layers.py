"""Layers of PyTorch, Keras, Flax and Equinox as targets: their parameters become arguments, and nothing is written."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from rmsnorm.targets.arguments import role_of
from rmsnorm.targets.bridges import bridge
from rmsnorm.targets.target import Shape, Target

_BASES: Final = {
    "torch": ("torch.nn.modules.module", "Module"),
    "keras": ("keras.src.layers.layer", "Layer"),
    "nnx": ("flax.nnx.pytreelib", "Pytree"),
    "linen": ("flax.linen.module", "Module"),
    "equinox": ("equinox._module._module", "Module"),
}


def family(thing: Any) -> str | None:
    """torch, keras, nnx, linen or equinox for a layer or its class, else None."""
    kind = thing if isinstance(thing, type) else type(thing)
    for base in kind.__mro__:
        for name, place in _BASES.items():
            if (base.__module__, base.__name__) == place:
                return name
    return None


def keras_library() -> str:
    """Whose arrays Keras computes with."""
    import keras

    return str(keras.backend.backend())


def assign(shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Role of each parameter by its name; a lone one of unknown name is the gain, a vector called gate is one.

    >>> assign({"norm.weight": (8,), "bias": (8,)})
    {'scale': 'norm.weight', 'bias': 'bias'}
    """
    roles: dict[str, str] = {}
    for name, shape in shapes.items():
        role = role_of(name)
        if role == "gate":
            role = "gate_vector" if len(shape) == 1 else None
        if role is None and name.rsplit(".", 1)[-1] == "offset":
            role = "bias"  # the name that Zhang & Sennrich gave it
        if role and role not in roles:
            roles[role] = name
    if not roles and len(shapes) == 1:
        roles["scale"] = next(iter(shapes))
    return roles


def _second_input(call: Callable[..., Any]) -> tuple[str, ...]:
    """Roles of the arguments after x of a layer's call: gate, mask, residual, by name."""
    try:
        parameters = list(inspect.signature(call).parameters.values())[1:]
    except (TypeError, ValueError):
        return ()
    found = [role_of(p.name) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD or p.kind is p.KEYWORD_ONLY]
    return tuple(role for role in found if role in ("gate", "mask", "residual"))


def _argument(call: Callable[..., Any], role: str) -> str:
    return next(name for name in inspect.signature(call).parameters if role_of(name) == role)


def _torch(layer: Any, name: str, device: str) -> Target:
    import torch

    layer = layer.to(device)
    own = {key: tuple(p.shape) for key, p in layer.named_parameters()}
    roles = assign(own)
    inputs = _second_input(layer.forward)
    size = own[roles["scale"]] if "scale" in roles else own.get(roles.get("bias", ""), ())
    fixed = size or getattr(layer, "normalized_shape", None)

    def call(arguments: Mapping[str, Any]) -> Any:
        parameters = {key: arguments[role] for role, key in roles.items() if role in arguments}
        named = {_argument(layer.forward, role): arguments[role] for role in inputs if role in arguments}
        return torch.func.functional_call(layer, parameters, (arguments["x"],), named)

    return Target(
        name, "torch", bridge("torch", device), call, (*roles, *inputs),
        width=int(np.prod(fixed)) if fixed else None,
        shape_of=lambda role, shape: own[roles[role]],
    )  # fmt: skip


def _keras(layer: Any, name: str, device: str) -> Target:
    config, make = layer.get_config(), type(layer)
    library = keras_library()
    inputs = tuple(role for role in _second_input(layer.call) if role != "mask")

    @functools.cache
    def built(shape: Shape, x: str, g: str) -> Any:
        import keras

        policy = x if x == g else f"mixed_{x}" if g == "float32" and x in ("float16", "bfloat16") else None
        if policy is None:
            raise TypeError(f"a Keras layer that computes in {x} has no {g} variables")
        fresh = make.from_config({**config, "dtype": keras.DTypePolicy(policy)})
        fresh.build(shape)
        return fresh

    def roles_for(shape: Shape) -> dict[str, str]:
        fresh = built(shape, "float32", "float32")
        return assign({variable.name: tuple(variable.shape) for variable in fresh.trainable_variables})

    def call(arguments: Mapping[str, Any]) -> Any:
        x = arguments["x"]
        shape = tuple(int(size) for size in x.shape)
        given = [arguments[role] for role in ("scale", "bias", "gate_vector") if role in arguments]
        fresh = built(shape, _dtype(x), _dtype(given[0]) if given else _dtype(x))
        roles = {key: role for role, key in roles_for(shape).items()}
        values = [arguments.get(roles.get(v.name, ""), v.value) for v in fresh.trainable_variables]
        others = [v.value for v in fresh.non_trainable_variables]
        named = {_argument(layer.call, role): arguments[role] for role in inputs if role in arguments}
        return fresh.stateless_call(values, others, x, **named)[0]

    def shape_of(role: str, shape: Shape) -> Shape:
        fresh = built(shape, "float32", "float32")
        key = roles_for(shape)[role]
        return next(tuple(v.shape) for v in fresh.trainable_variables if v.name == key)

    probe = _rank(layer.get_config())
    try:
        roles: dict[str, str] = roles_for(probe)
    except Exception:  # said when it is called
        roles = {}
    return Target(name, "keras", bridge(library, device), call, (*roles, *inputs), shape_of=shape_of)


def _rank(config: Mapping[str, Any]) -> Shape:
    """A shape of x with as many axes as the layer's axis asks for."""
    axis = config.get("axis", -1)
    axes = axis if isinstance(axis, (list, tuple)) else [axis]
    need = max((entry + 1 if entry >= 0 else -entry for entry in axes), default=1)
    return (4,) * (max(need, 2) - 1) + (8,)


def _dtype(tensor: Any) -> str:
    name = getattr(tensor.dtype, "name", None) or str(tensor.dtype)
    return name.rsplit(".", 1)[-1]


def _nnx(layer: Any, name: str, device: str) -> Target:
    from flax import nnx

    graph, state = nnx.split(layer)
    flat = _flat(nnx.to_pure_dict(state))
    own = {key: tuple(np.shape(value)) for key, value in flat.items() if np.ndim(value)}
    roles = assign(own)
    inputs = _second_input(layer.__call__)

    def call(arguments: Mapping[str, Any]) -> Any:
        import jax

        fresh = jax.tree.map(lambda leaf: leaf, state)
        values = dict(flat)
        values |= {key: arguments[role] for role, key in roles.items() if role in arguments}
        nnx.replace_by_pure_dict(fresh, _nested(values))
        named = {_argument(layer.__call__, role): arguments[role] for role in inputs if role in arguments}
        return nnx.merge(graph, fresh)(arguments["x"], **named)

    width = int(np.prod(own[roles["scale"]])) if "scale" in roles else None
    return Target(
        name, "flax", bridge("jax", device), call, (*roles, *inputs), width=width,
        shape_of=lambda role, shape: own[roles[role]],
    )  # fmt: skip


def _flat(tree: Mapping[Any, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        here = (*path, str(key))
        found |= _flat(value, here) if isinstance(value, Mapping) else {".".join(here): value}
    return found


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, last = path.split(".")
        here = tree
        for folder in folders:
            here = here.setdefault(folder, {})
        here[last] = value
    return tree


def _linen(layer: Any, name: str, device: str) -> Target:
    import jax

    inputs = _second_input(type(layer).__call__)

    @functools.cache
    def shapes(shape: Shape) -> dict[str, Shape]:
        made = jax.eval_shape(layer.init, jax.random.key(0), jax.ShapeDtypeStruct(shape, np.float32))
        return {key: tuple(leaf.shape) for key, leaf in _flat(made.get("params", {})).items()}

    @functools.cache
    def own(shape: Shape) -> dict[str, Any]:
        return _flat(layer.init(jax.random.key(0), np.zeros(shape, np.float32)).get("params", {}))

    def call(arguments: Mapping[str, Any]) -> Any:
        x = arguments["x"]
        roles = assign(shapes(tuple(x.shape)))
        values = {key: arguments[role] for role, key in roles.items() if role in arguments}
        if len(values) < len(shapes(tuple(x.shape))):
            values = {**own(tuple(x.shape)), **values}
        named = {_argument(type(layer).__call__, role): arguments[role] for role in inputs if role in arguments}
        return layer.apply({"params": _nested(values)}, x, **named)

    try:
        roles: dict[str, str] = assign(shapes((4, 4, 4, 8)))
    except Exception:  # said when it is called
        roles = {}
    return Target(
        name, "flax", bridge("jax", device), call, (*roles, *inputs),
        shape_of=lambda role, shape: shapes(shape)[assign(shapes(shape))[role]],
    )  # fmt: skip


def _equinox(layer: Any, name: str, device: str) -> Target:
    import jax

    leaves, tree = jax.tree_util.tree_flatten_with_path(layer)
    keys = [jax.tree_util.keystr(path).lstrip(".") for path, _ in leaves]
    own = {key: tuple(leaf.shape) for key, (_, leaf) in zip(keys, leaves, strict=True) if np.ndim(leaf)}
    roles = assign(own)
    shape = tuple(getattr(layer, "shape", None) or next(iter(own.values()), ()))

    def call(arguments: Mapping[str, Any]) -> Any:
        chosen = {key: arguments[role] for role, key in roles.items() if role in arguments}
        values = [chosen.get(key, leaf) for key, (_, leaf) in zip(keys, leaves, strict=True)]
        function = jax.tree_util.tree_unflatten(tree, values)
        for _ in range(arguments["x"].ndim - max(1, len(shape))):
            function = jax.vmap(function)  # an Equinox layer takes one example
        return function(arguments["x"])

    return Target(
        name, "equinox", bridge("jax", device), call, tuple(roles), width=int(np.prod(shape)) if shape else None,
        shape_of=lambda role, _: own[roles[role]],
    )  # fmt: skip


OPEN: Final[dict[str, Callable[[Any, str, str], Target]]] = {
    "torch": _torch,
    "keras": _keras,
    "nnx": _nnx,
    "linen": _linen,
    "equinox": _equinox,
}
