"""Changes modules of any framework in place, and takes everything back if one change fails."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rmsnorm.conversion.replacement.layout import Norm


class Replaced:
    """The second base of a replaced module's class; the first one is the class that it had."""

    __slots__ = ()  # an object can become one of a class of the same layout
    norm: Norm


def subclass(make: Callable[[Any, Norm], Any], kind: Any, norm: Norm, method: str, call: Callable[..., Any]) -> Any:
    """A class like ``kind`` with another method, which pickles and calls itself by its name; ``make`` makes it."""

    def __reduce_ex__(self: Any, protocol: int) -> Any:
        state = self.__getstate__()
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name != "_kept"}  # of this process alone
        return _made_again, (make, kind, norm), state

    names = {method: functools.wraps(getattr(kind, method))(call), "__reduce_ex__": __reduce_ex__, "norm": norm,
             "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}  # fmt: skip
    return type(kind)(kind.__name__, (kind, Replaced), names)


def _made_again(make: Callable[[Any, Norm], Any], kind: Any, norm: Norm) -> Any:
    made = make(kind, norm)
    return made.__new__(made)


def change(changes: Sequence[tuple[Any, Norm]], become: Callable[[Any, Norm], None]) -> None:
    """Replaces all modules, or none if one fails."""
    before = [(module, type(module), dict(vars(module))) for module, _ in changes]
    try:
        for module, norm in changes:
            become(module, norm)
    except BaseException:
        for module, kind, attributes in before:
            object.__setattr__(module, "__class__", kind)
            vars(module).clear()
            vars(module).update(attributes)
        raise
