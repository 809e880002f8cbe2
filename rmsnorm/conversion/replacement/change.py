"""Changes modules of any framework in place, and takes everything back if one change fails."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.specification import errors


class Replaced:
    """The second base of a replaced module's class; the first one is the class that it had."""

    __slots__ = ()  # an object can become one of a class of the same layout
    norm: Norm


def subclass(make: Callable[[Any, Norm], Any], kind: Any, norm: Norm, **methods: Callable[..., Any]) -> Any:
    """A class like ``kind`` with other methods, which pickles and calls itself by its name; ``make`` makes it."""

    def __reduce_ex__(self: Any, protocol: int) -> Any:
        state = self.__getstate__()
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name != "_kept"}  # of this process alone
        return _made_again, (make, kind, norm), state

    def __setattr__(self: Any, name: str, value: Any) -> None:
        require_its_eps(norm, vars(self), name, value)
        kind.__setattr__(self, name, value)

    names = {
        **{name: functools.wraps(getattr(kind, name))(method) for name, method in methods.items()},
        "__reduce_ex__": __reduce_ex__, "norm": norm, "__setattr__": __setattr__,
        "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
    }  # fmt: skip
    return type(kind)(kind.__name__, (kind, Replaced), names)


def _made_again(make: Callable[[Any, Norm], Any], kind: Any, norm: Norm) -> Any:
    made = make(kind, norm)
    return made.__new__(made)


def require_its_eps(norm: Norm, attributes: Mapping[str, Any], name: str, value: Any) -> None:
    """A replaced module computes with the eps that it had; its attributes of eps may be set to what they are alone.

    Raises:
        InputValueError: another eps is assigned.
    """
    if name in norm.of_eps and attributes.get(name, value) != value:
        want = f"{errors.shown(attributes[name])}, with which replace has replaced this norm"
        fix = "set it before you call replace, or give replace a variant with that eps"
        raise errors.out_of_domain("replace", name, value, want, fix)


def called_with(
    norm: Norm, is_float: Callable[[Any], bool], inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, Any]:
    """x and the gate of a call; (None, None) of one with anything else, which the replaced module computes itself."""
    if len(inputs) + len(named) != (1 if norm.gate is None else 2):
        return None, None
    x: Any = inputs[0] if inputs else named.get(norm.x)
    if norm.gate is None:
        return x, None
    gate: Any = inputs[1] if len(inputs) == 2 else named.get(norm.gate)
    fits = is_float(x) and is_float(gate) and tuple(gate.shape) == tuple(x.shape)
    return (x, gate) if fits else (None, None)


def axes_of(norm: Norm) -> tuple[Any, Any]:
    """``axis`` and ``feature_axis`` of the call."""
    return (norm.axes, norm.gain_axes) if norm.group is None else (-1, (-2, -1))


def in_groups(xp: Any, norm: Norm, shape: Sequence[Any], *arrays: Any) -> list[Any]:
    """x, which has this shape, the gain, the bias and the gate, if there is one, in groups where the layer has them."""
    if norm.group is None:
        return list(arrays)
    groups = [shape[-1] // norm.group, norm.group]
    shapes = [[*shape[:-1], *groups], groups, groups, [*shape[:-1], *groups]]
    return [None if array is None else xp.reshape(array, own) for array, own in zip(arrays, shapes, strict=False)]


def computed(
    xp: Any, rms_norm: Callable[..., Any], norm: Norm, shape: Sequence[Any], x: Any, scale: Any, bias: Any, gate: Any
) -> Any:
    """y of x, which has this shape, by the rms_norm of a framework."""
    x, scale, bias, gate = in_groups(xp, norm, shape, x, scale, bias, gate)
    axis, feature_axis = axes_of(norm)
    y = rms_norm(x, scale, bias, variant=norm.known, axis=axis, feature_axis=feature_axis, gate=gate)
    return y if norm.group is None else xp.reshape(y, shape)


def change(
    changes: Sequence[tuple[Any, Norm]], become: Callable[[Any, Norm], None], finish: Callable[[], None]
) -> None:
    """Replaces all modules and finishes; if one of these fails, every module is what it was before."""
    take_back = _remembered([module for module, _ in changes])
    try:
        for module, norm in changes:
            become(module, norm)
        finish()
    except BaseException:
        take_back()
        raise


@contextlib.contextmanager
def taken_back(modules: Sequence[Any]) -> Iterator[None]:
    """At its end every module is what it was before."""
    take_back = _remembered(modules)
    try:
        yield
    finally:
        take_back()


def _remembered(modules: Sequence[Any]) -> Callable[[], None]:
    """What makes modules again what they are now."""
    before = [(module, type(module), vars(module).copy(), _contents(module)) for module in modules]

    def take_back() -> None:
        for module, kind, attributes, contents in before:
            object.__setattr__(module, "__class__", kind)
            vars(module).clear()
            vars(module).update(attributes)
            for name, content in contents.items():
                attributes[name].clear()
                attributes[name].update(content)

    return take_back


def _contents(module: Any) -> dict[str, Any]:
    """Copies of a module's own dictionaries and sets, such as ``_parameters`` and hooks, which change in place."""
    return {name: copy.copy(value) for name, value in vars(module).items() if type(value) in (dict, OrderedDict, set)}
