"""Opens a target: a callable, a layer, a class or factory of layers, ``module:attribute``, an ONNX file."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from rmsnorm.specification import errors
from rmsnorm.specification.frameworks import FRAMEWORKS
from rmsnorm.specification.frameworks import framework as row_of
from rmsnorm.targets.arguments import (
    Unguessable,
    argument_names,
    arguments_of,
    constructor_arguments,
    eps_argument,
    makes_layers,
    required_options,
    width_argument,
)
from rmsnorm.targets.bridges import bridge
from rmsnorm.targets.calling import Caller
from rmsnorm.targets.layers import keras_library, opener, probed
from rmsnorm.targets.locate import locate, raised
from rmsnorm.targets.models import is_model
from rmsnorm.targets.onnx import open_onnx
from rmsnorm.targets.target import WIDTH as WIDTH
from rmsnorm.targets.target import NoTarget, Target, TargetError, WrongResult

_FACTORY: Final = "or name a function without arguments that returns the layer"
_HOW: Final = f"pass it in init, such as --init {{}}=64, {_FACTORY}"
_KNOWN: Final = "pass one of these in init"
_OPTION: Final = "pass an option in init, such as --init {}=1, or "
_MODEL: Final = (
    "{name} is a whole model ({kind}), expected one norm; for all norms in it, name it to rmsnorm identify, or ask "
    "rmsnorm.conversion.replace(model, dry_run=True)"
)
_NAMED: Final = (
    "name a function of x, of (x, weight) or of (x, weight, bias) that calls it, as lambda x, weight: {}(...)"
)
_PACKAGES: Final = {name for row in FRAMEWORKS.values() for name in (row.package, row.layers)}


def open_target(
    target: Any,
    *,
    framework: str | None = None,
    width: int | None = None,
    init: Mapping[str, Any] | None = None,
    device: str = "cpu",
    shape: Sequence[int] | None = None,
    axis: int | Sequence[int] = -1,
    call: str | None = None,
    op: str = "identify",
) -> Target:
    """Make a Target of a function, a layer or a model.

    Args:
        target: a function of x, or of (x, weight), (x, weight, bias, eps=...) and the like; a layer of PyTorch,
            Keras or Flax (nnx, linen); its class, or a function that makes it and requires no argument beside those of
            ``init``; a ``module:attribute`` or ``file.py:attribute`` that names one of these; an .onnx file; a Target,
            which is returned as it is.
        framework: for a function that does not show whose arrays it takes: torch, tf, keras, jax, flax, numpy, or
            another name of rmsnorm.specification.frameworks.
        width: size of the normalised axis to build and to call it with; None for 64, or the only size that it takes.
        init: arguments for its constructor, or options for a function.
        device: cpu or cuda.
        shape: of x; None for the first one that it takes.
        axis: the axes of x along which a function's parameters run; their sizes are the width of a layer.
        op: what asks, with which the sentences of errors begin.

    Raises:
        NoTarget (a ValueError): there is no target of that name, no such framework, or an argument that it requires
            cannot be guessed.

    Example:
        >>> import numpy as np
        >>> halve = open_target(lambda x: x / 2)
        >>> halve.forward(np.ones((2, 4), "float32")).dtype.name
        'float32'
    """
    if isinstance(target, Target):
        return target
    if framework is not None:
        try:
            row = row_of(op, framework)
        except ValueError as error:
            raise NoTarget(str(error)) from None
        framework = framework if framework in (row.package, row.layers) else row.package  # as reports name it
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    try:
        if isinstance(target, (str, Path)) and str(target).endswith(".onnx"):
            return open_onnx(Path(target), device)
        if shape is not None:
            if not all(-len(shape) <= entry < len(shape) for entry in axes):
                raise NoTarget(f"axis is {axis}, expected axes of shape {tuple(shape)}")
            width = width or math.prod(shape[entry] for entry in axes)
        thing, name = (locate(target), target) if isinstance(target, str) else (target, name_of(target))
        opened = _open(thing, name, width, dict(init or {}), _Call(framework, device, axes, call))
    except NoTarget as error:
        raise NoTarget(f"{op}: {error}", error.model) from error.__cause__
    return replace(opened, x_shape=None if shape is None else tuple(shape))


@dataclass(frozen=True)
class _Call:
    """How to call what is opened: the axes of a function's parameters, and its arguments by their places, in words.

    ``fresh``: whether nobody else has it.
    """

    framework: str | None
    device: str
    axes: tuple[int, ...]
    order: str | None
    fresh: bool = False


def _open(thing: Any, name: str, width: int | None, init: dict[str, Any], call: _Call) -> Target:
    target = _opened(thing, name, width, init, call)
    if not isinstance(thing, type) and not target.required:  # of a class, the layer was asked
        called = next((getattr(thing, name) for name in ("forward", "call") if hasattr(thing, name)), thing)
        target = replace(target, required=required_options(called))
    return replace(target, library=target.library or library_of(thing))


def library_of(thing: Any) -> str:
    """The package that the class of a layer, or a function, is of."""
    return (getattr(_plain(thing), "__module__", None) or "").partition(".")[0]  # of an object that of its class


def _opened(thing: Any, name: str, width: int | None, init: dict[str, Any], call: _Call) -> Target:
    open_layer = opener(thing)
    if isinstance(thing, type) or (open_layer is None and call.order is None and makes_layers(thing, init)):
        return _built(thing, name, width, init, call)
    if open_layer is not None and init:
        raise NoTarget(f"{name} is a layer that is built already, expected no init; pass its class")
    if is_model(thing):
        raise NoTarget(_MODEL.format(name=name, kind=type(thing).__name__), thing)
    if open_layer is not None:
        return open_layer(thing if call.fresh else probed(thing, name), name, call.device)
    if not callable(thing):
        raise NoTarget(f"{name} is of type {type(thing).__name__}, expected a function, a layer or a class of layers")
    known = argument_names(thing)
    for option in init if known is not None else ():
        if option not in (known or ()):
            raise NoTarget(f"{name} takes no argument {option!r}, expected some of {', '.join(known or ())}")
    return _function(functools.partial(thing, **init) if init else thing, name, call)


def _built(make: Callable[..., Any], name: str, width: int | None, init: dict[str, Any], call: _Call) -> Target:
    """A layer from its class or from a function that makes it; ``resized`` builds it again for another width."""
    own_width, eps = width_argument(init), eps_argument(make)
    size = width or (init[own_width] if own_width else WIDTH)

    def build(size: int) -> Target:
        try:
            arguments = constructor_arguments(make, {**init, own_width: size} if own_width else init, size)
        except Unguessable as error:
            raise NoTarget(f"{name} {error}; {_HOW.format(error.argument) if error.argument else _KNOWN}") from None
        try:
            made = make(**arguments)
        except (Exception, SystemExit) as error:  # a constructor may raise anything
            lines = str(error).strip().splitlines() or ["without a message"]
            shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())[:120]
            raise NoTarget(f"{name}({shown}) raised {raised(lines[0], error)}; pass init, {_FACTORY}") from error
        is_new = isinstance(make, type)
        opened = _open(made, name, None, {}, replace(call, fresh=is_new))
        opened = replace(opened, resized=build, is_new=is_new, named_width=init.get(own_width or ""))
        if opened.width is None and (named := width_argument(arguments)) and arguments[named] == size:
            opened = replace(opened, width=size)  # without a gain of that size, it may still compute with it
        if eps is None:
            return opened
        key, required = eps
        return replace(
            opened, asks={"eps": required and key not in init},
            remade=lambda values: _built(make, name, size, {**init, key: values["eps"]}, call),
        )  # fmt: skip

    return build(size)


def _function(function: Callable[..., Any], name: str, how: _Call) -> Target:
    """A function; where it does not show whose arrays it takes, those of several libraries are tried."""
    one = how.axes[0] if len(how.axes) == 1 else how.axes
    try:
        slots = arguments_of(function, one, how.order)
    except Unguessable as error:
        option = _OPTION.format(error.argument) if error.argument else ""
        raise NoTarget(f"{name} {error}; {option}{_NAMED.format(name.rpartition(':')[2])}") from None

    def shape_of(argument: str, shape: Sequence[int]) -> tuple[int, ...]:
        axes = sorted(entry % len(shape) for entry in how.axes)
        return tuple(int(shape[entry]) for entry in axes)

    def target_for(candidate: str, caller: Caller) -> Target:
        library = keras_library() if candidate == "keras" else candidate

        def call(arrays: Mapping[str, Any]) -> Any:  # a function, as compilers take it
            return caller(arrays)

        return Target(
            name, candidate, bridge(library, how.device), call, caller.arguments, notes=caller.notes,
            shape_of=shape_of, asks=caller.asks, automatic=not caller.writes, required=caller.required,
            optional=caller.optional, remade=lambda values: target_for(candidate, caller.with_values(**values)),
        )  # fmt: skip

    def answers(target: Target) -> bool:
        for shape, dtype in ((4, 8), "float32"), ((4, 128), "bfloat16"), ((4, 128), "float16"):
            x = np.linspace(0.5, 2, math.prod(shape)).reshape(shape).astype(dtype)
            arrays = {a: x if a in ("gate", "residual") else x[0] for a in target.arguments if a != "mask"}
            with contextlib.suppress(TargetError):
                with contextlib.suppress(WrongResult):  # as codes are, which are an answer, too
                    target.forward(x, **arrays)
                return True
        return False

    own = Caller(function, slots, functools.partial(shape_of, "scale"))
    candidates = [how.framework] if how.framework else _candidates(function)
    if len(candidates) == 1:
        return target_for(candidates[0], own)
    working, missing = [], None
    for candidate in candidates:
        try:
            target = target_for(candidate, own)
        except errors.InputError as error:  # the library is not on that device
            missing = missing or error
            continue
        if not answers(target):
            continue
        if not target.returned:
            return target
        working.append(target)  # NumPy's arrays go into many a function of TensorFlow, and its tensors come back
    if missing is not None and not working:
        raise missing
    return working[0] if working else target_for(candidates[0], own)  # the report says what it raises, or returns


def _plain(function: Any) -> Any:
    """What is inside of partial and of wrappers."""
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    return function


def _candidates(function: Any) -> list[str]:
    """Frameworks whose arrays a function may take, the likeliest first."""
    function = _plain(function)
    own = str(getattr(function, "__module__", "") or "").split(".")[0]
    others = _PACKAGES - {"numpy"}
    if own in others:
        return [own]
    space, used = getattr(function, "__globals__", {}), list[Any]()
    with contextlib.suppress(TypeError, ValueError):  # it is no function of Python, or a variable has no value yet
        seen = inspect.getclosurevars(function)
        used = [*seen.globals.values(), *(v for v in seen.nonlocals.values() if isinstance(v, types.ModuleType))]
    near = sorted({_package(value) for value in space.values() if isinstance(value, types.ModuleType)} & others)
    loaded = [row.package for row in FRAMEWORKS.values() if row.package in sys.modules]
    named = [package for package in map(_package, used) if package in _PACKAGES]
    return list(dict.fromkeys([*named, *near, "numpy", *loaded]))


def _package(value: Any) -> str:
    module = value.__name__ if isinstance(value, types.ModuleType) else str(getattr(value, "__module__", "") or "")
    return module.split(".")[0]


def name_of(thing: Any) -> str:
    """The module and the name of a function, or of the class of something else."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}:{named.__qualname__}"
