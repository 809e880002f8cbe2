"""Opens a target: a callable, a layer, a class or factory of layers, ``module:attribute``, an ONNX file."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from rmsnorm.targets import layers
from rmsnorm.targets.arguments import Unguessable, arguments_of, constructor_arguments, makes_layers, resizable
from rmsnorm.targets.bridges import bridge
from rmsnorm.targets.onnx import open_onnx
from rmsnorm.targets.target import NoTarget, Target, TargetError

FRAMEWORKS: Final = ("numpy", "torch", "tensorflow", "jax", "keras", "flax", "equinox", "onnx")
_ARRAYS: Final = ("torch", "keras", "tensorflow", "jax", "flax", "equinox")
WIDTH: Final = 64
_LIBRARY: Final = {
    "torch": "torch",
    "jax": "jax",
    "flax": "jax",
    "equinox": "jax",
    "tensorflow": "tensorflow",
    "numpy": "numpy",
}


def open_target(
    target: Any,
    *,
    framework: str | None = None,
    width: int | None = None,
    init: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> Target:
    """Open what a user points at.

    Args:
        target: a function of x, or of (x, weight), (x, weight, bias, eps=...) and the like; a layer of PyTorch,
            Keras, Flax (nnx, linen) or Equinox; its class, or what makes it; a ``module:attribute`` or
            ``file.py:attribute`` that names one of these; an .onnx file; a Target, which is returned as it is.
        framework: numpy, torch, tensorflow, jax or keras for a function that does not show whose arrays it takes.
        width: size of the normalised axis to build and to call it with; None for 64, or what it takes.
        init: arguments for its constructor, or options for a function.
        device: cpu or cuda.

    Raises:
        NoTarget (a ValueError): there is nothing of that name, or an argument that it requires cannot be guessed.

    Example:
        >>> import numpy as np
        >>> halve = open_target(lambda x: x / 2)
        >>> halve.forward(np.ones((2, 4), "float32")).dtype.name
        'float32'
    """
    if isinstance(target, Target):
        return target
    if framework is not None and framework not in FRAMEWORKS:
        raise NoTarget(f"identify: framework is {framework!r}, expected one of {', '.join(FRAMEWORKS)}")
    init = dict(init or {})
    name = target if isinstance(target, str) else _name(target)
    if isinstance(target, (str, Path)) and str(target).endswith(".onnx"):
        return open_onnx(Path(target), width=width)
    thing = locate(target) if isinstance(target, str) else target
    return _open(thing, name, framework, width, init, device)


def locate(name: str) -> Any:
    """Import what ``module:attribute`` or ``file.py:attribute`` names."""
    module_name, colon, attribute = name.rpartition(":")
    if not colon or not module_name or not attribute:
        raise NoTarget(
            f"identify: target is {name!r}, expected module:attribute such as torch.nn:RMSNorm, or an .onnx file"
        )
    try:
        module: Any = (
            _from_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
        )
    except Exception as error:  # importing runs foreign code
        raise NoTarget(
            f"identify: {module_name} cannot be imported ({type(error).__name__}: {error}); check the name"
        ) from error
    for part in attribute.split("."):
        if not hasattr(module, part):
            raise NoTarget(f"identify: {module_name} has no {attribute!r}; check the name")
        module = getattr(module, part)
    return module


def _from_file(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == spec.origin:
        return loaded
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _open(thing: Any, name: str, framework: str | None, width: int | None, init: dict[str, Any], device: str) -> Target:
    family = layers.family(thing)
    if isinstance(thing, type) or (family is None and not init and makes_layers(thing)):
        return _built(thing, name, framework, width, init, device)
    if init and family is not None:
        raise NoTarget(f"identify: {name} is a layer that is built already, expected no init; pass its class")
    if family is not None:
        return layers.OPEN[family](thing, name, device)
    if not callable(thing):
        raise NoTarget(
            f"identify: {name} is of type {type(thing).__name__}, expected a function, a layer or a class of layers"
        )
    return _function(functools.partial(thing, **init) if init else thing, name, framework, device)


def _built(
    make: Callable[..., Any], name: str, framework: str | None, width: int | None, init: dict[str, Any], device: str
) -> Target:
    """A layer from its class or factory, and how to build it again for another width."""
    given = resizable(make, init)
    size = width or (init[given] if given else WIDTH)

    def build(size: int) -> Target:
        try:
            arguments = constructor_arguments(make, {**init, given: size} if given else init, size)
        except Unguessable as error:
            raise NoTarget(f"identify: {name} {error}; pass it in init, such as --init '{{\"dim\": 64}}'") from None
        try:
            made = make(**arguments)
        except Exception as error:  # a constructor is foreign code
            story = str(error).strip().splitlines() or ["without a message"]
            shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())[:120]
            raise NoTarget(f"identify: {name}({shown}) raised {type(error).__name__}: {story[0]}; pass init") from error
        target = _open(made, name, framework, None, {}, device)
        target.resized = build
        return target

    return build(size)


def _function(function: Callable[..., Any], name: str, framework: str | None, device: str) -> Target:
    try:
        roles, names, values = arguments_of(function)
    except Unguessable as error:
        raise NoTarget(f"identify: {name} {error}; pass it in init, such as --init '{{\"eps\": 1e-6}}'") from None

    def call(arguments: Mapping[str, Any]) -> Any:
        x = arguments["x"]
        positional, named = [x], {}
        for role, key in names.items():
            if role != "x" and role in arguments:
                if key:
                    named[key] = arguments[role]
                else:
                    positional.append(arguments[role])
        for key, value in values.items():
            scale = arguments.get("scale")
            if value == "the shape of the gain":
                value = tuple(x.shape[-1:] if scale is None else scale.shape)
            named[key] = int(x.shape[-1]) if value == "the width" else value
        return function(*positional, **named)

    notes = tuple(f"{key}={value!r} was passed" for key, value in values.items() if not isinstance(value, str))
    candidates = [framework] if framework else _candidates(function)
    targets = []
    for candidate in candidates:
        library = layers.keras_library() if candidate == "keras" else _LIBRARY.get(candidate or "", candidate or "")
        target = Target(name, candidate or library, bridge(library, device), call, roles, notes=notes)
        targets.append(target)
        if len(candidates) == 1:
            break
        try:
            x = np.linspace(0.5, 2, 32, dtype=np.float32).reshape(4, 8)
            target.forward(
                x, **{role: x if role == "gate" else x[0] for role in roles if role in ("scale", "bias", "gate")}
            )
        except TargetError:
            continue
        return target
    return targets[0]  # what it raises is what there is to say


def _candidates(function: Any) -> list[str]:
    """Frameworks whose arrays a function may take, the likeliest first."""
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    own = str(getattr(function, "__module__", "") or "")
    for package in _ARRAYS:
        if own == package or own.startswith(package + "."):
            return [package]
    code, space = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    used = [_package(space[word]) for word in getattr(code, "co_names", ()) if word in space]
    near = sorted({_package(value) for value in space.values() if isinstance(value, types.ModuleType)} & set(_ARRAYS))
    loaded = [package for package in ("torch", "jax", "tensorflow") if package in sys.modules]
    return list(
        dict.fromkeys([*(package for package in used if package in (*_ARRAYS, "numpy")), *near, "numpy", *loaded])
    )


def _package(value: Any) -> str:
    module = value.__name__ if isinstance(value, types.ModuleType) else str(getattr(value, "__module__", "") or "")
    return module.split(".")[0]


def _name(thing: Any) -> str:
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}:{named.__qualname__}"
