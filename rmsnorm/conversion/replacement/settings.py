"""The attributes that a module's own call may read: a proof is one for their values, and for no other ones.

A replaced module compares them in every call. Where one has another value, its class's own code runs. They are read
from the code of the class, as a trial of the call would miss those that another branch reads.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Final, NamedTuple

from rmsnorm.conversion.replacement.report import Unproven

_MISSING: Final = object()
_LASTING: Final = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, enum.Enum)
_LIBRARIES: Final = frozenset({"torch", "keras", "tensorflow", "jax", "flax", "numpy"}) | sys.stdlib_module_names
_DEPTH: Final = 3  # of objects in objects, such as a part of a configuration

Path = tuple[str, ...]


class Settings(NamedTuple):
    """What the own call of a module may read beside its parameters.

    Attributes:
        values: of its attributes, by name.
        inner: of attributes of objects that it holds, by path, and the contents of its lists and dictionaries.
        absent: what its ``__dict__`` lacks of that: methods of its class, and what ``getattr(self, "name", 0)`` reads.
    """

    values: tuple[tuple[str, Any], ...] = ()
    inner: tuple[tuple[Path, Any], ...] = ()
    absent: Path = ()

    def check(self) -> Callable[[Any], bool]:
        """A function of a module: whether it still has them. It is as short as it can be, as every call asks it."""
        values, inner, absent = self

        def are_kept(module: Any) -> bool:
            for name, value in values:
                now = getattr(module, name, None)
                if now is not value and (type(now) is not type(value) or now != value):
                    return False
            return not (inner or absent) or are_others_kept(module)

        def are_others_kept(module: Any) -> bool:
            for path, value in inner:
                now = module
                for name in path:
                    now = getattr(now, name, None)
                if _content(now) != value:
                    return False
            own = module.__dict__
            for name in absent:  # noqa: SIM110  (Dynamo takes no generator here)
                if name in own:
                    return False
            return True

        return are_kept


def settings_of(module: Any, base: type, call: str, common: Mapping[str, Any], tensors: Sequence[str]) -> Settings:
    """Those of a module of a framework.

    Args:
        base: the framework's class of modules.
        call: the name of the own call.
        common: what every module of the framework has.
        tensors: the names of the parameters and buffers, which are read in every call.

    Raises:
        Unproven: an attribute may change unseen, as an array that is no parameter does.
    """
    kind: Any = type(module)
    words, texts = _words(kind, base, call)
    own = vars(module).keys() - common.keys()
    names = own if words is None else {word for word in words if not hasattr(base, word)} - common.keys()
    values: list[Any] = []
    inner: list[Any] = []
    absent: list[str] = []
    for name in sorted(names.difference(tensors)):
        of_class = inspect.getattr_static(type(module), name, _MISSING)
        if isinstance(of_class, property):  # whose code is looked through
            continue
        value = getattr(module, name, _MISSING)
        if value is _MISSING or (name not in own and inspect.isroutine(value)):
            absent += [name] * (of_class is not _MISSING or name in texts)
        elif _is_plain(value):
            values.append((name, value))
        else:
            inner += _inside((name,), value, words)
    return Settings(tuple(values), tuple(inner), tuple(absent))


def _inside(path: Path, value: Any, words: frozenset[str] | None) -> Iterator[tuple[Path, Any]]:
    """What an object holds: its plain attributes, and the contents of containers, with their paths."""
    if _is_plain(value) or _is_container(value):
        content = _content(value)
        if _hashes(content):
            yield path, content
            return
    elif hasattr(value, "__dict__") and not hasattr(value, "shape") and len(path) <= _DEPTH:
        yield (*path, "__class__"), type(value)
        read = {word for word in words or () if word[:2] != "__" and hasattr(value, word)}
        entries = {name: getattr(value, name, None) for name in sorted(read or vars(value))}
        for name, entry in entries.items():
            if not inspect.ismethod(entry):
                yield from _inside((*path, name), entry, words)
        return
    raise Unproven(f"its {'.'.join(path)} is no parameter or buffer, and may change where replace sees nothing of it")


def _is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, Set, Sequence)) and not isinstance(value, (str, bytes))


def _is_plain(value: Any) -> bool:
    """Whether it never changes, as a number, a text or a function."""
    is_lasting = isinstance(value, _LASTING) or not hasattr(value, "__dict__")
    return is_lasting and not _is_container(value) and _hashes(value)


def _hashes(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _content(value: Any) -> Any:
    """What is equal for containers of equal values, and can be looked up."""
    if isinstance(value, Mapping):
        return tuple((key, _content(entry)) for key, entry in value.items())
    if isinstance(value, Set):
        return frozenset(value)
    if _is_container(value):
        return tuple(_content(entry) for entry in value)
    return value


@functools.cache
def _words(kind: type, base: type, call: str) -> tuple[frozenset[str] | None, frozenset[str]]:
    """The names in the code of a class and of the functions that it names, and those of them that are texts.

    The first is None if the code of the call is unknown.
    """
    if _function(getattr(kind, call)) is None:
        return None, frozenset()
    classes = [cls for cls in kind.__mro__ if cls not in base.__mro__]
    todo = [value for cls in classes for name, value in vars(cls).items() if name == call or name[:2] != "__"]
    words: set[str] = set()
    texts: set[str] = set()
    seen: set[Any] = set()
    while todo:
        value = todo.pop()
        todo += [other for name in ("__wrapped__", "func") if (other := getattr(value, name, None)) is not None]
        function = _function(value)
        if function is None or function in seen:
            continue
        seen.add(function)
        named = set(_names(function.__code__, texts))
        words |= named
        scope = function.__globals__
        values = [scope[name] for name in named & scope.keys()]
        with contextlib.suppress(ValueError):  # a variable was deleted
            values += inspect.getclosurevars(function).nonlocals.values()
        modules = [value for value in values if inspect.ismodule(value) and not _is_of_library(value.__name__)]
        values += [getattr(module, name, None) for module in modules for name in named]
        routines = [value for value in values if inspect.isroutine(value)]  # a method of a built-in has no module
        todo += [value for value in routines if not _is_of_library(getattr(value, "__module__", None))]
    return frozenset(words), frozenset(texts)


def _function(value: Any) -> types.FunctionType | None:
    """The function of Python that a method or a property is made of, if there is one."""
    for name in ("fget", "__func__"):
        value = getattr(value, name, value)
    return value if isinstance(value, types.FunctionType) else None


def _is_of_library(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES


def _names(code: types.CodeType, texts: set[str]) -> Iterator[str]:
    """The names in a function, and in the functions inside. Those of its strings are added to the texts."""
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, str) and value.isidentifier():
            texts.add(value)
            yield value
        elif isinstance(value, types.CodeType):
            yield from _names(value, texts)
