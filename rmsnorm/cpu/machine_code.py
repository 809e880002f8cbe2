"""The machine code of the kernels: from the library of the wheel, else what numba compiled once and the disk keeps.

A library has the common functions (see build.py), for a level of processors. To load it needs neither numba nor
llvmlite. The code of a function that it lacks is kept by itself, and loaded without numba, which takes longer to import
than all that a program needs.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import RLock
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm import environment
from rmsnorm.cpu import target
from rmsnorm.cpu.cache import sources
from rmsnorm.cpu.settings import CODE, GATES, KERNELS, OPTIONS, STORAGE, TABLE, cancelled_place

KINDS: Final = ("forward", "backward")
_GATES: Final = ("", *GATES)
_SHAPE: Final = (  # of keys of kernels
    len(KINDS), len(STORAGE), len(STORAGE), len(CODE), len(CODE), 2 ** len(OPTIONS), len(_GATES),
)  # fmt: skip
WORDS: Final = KERNELS + int(np.prod(_SHAPE))  # of the table

_addresses: dict[str, int] = {}
_stubs: list[Any] = []  # compiled code refers to them
_lock = RLock()


def library_name(level: str) -> str:
    """The name of the file of a library."""
    return f"kernels-{level}.so"


def mark() -> str:
    """A name that a library has if it was made of the sources that are here; empty where these cannot be read."""
    try:
        return f"rmsnorm_of_{sources()}"
    except OSError:  # in a bundle
        return ""


def library_folder() -> Path | None:
    folder = environment.read("RMSNORM_CPU_LIBRARY") or str(Path(__file__).parent)
    return None if folder == "0" else Path(folder)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The library for this processor, from RMSNORM_CPU_LIBRARY, a folder, or beside this file. None if there is none.

    With RMSNORM_CPU_LIBRARY=0 none is used, and everything is compiled.
    """
    folder = library_folder()
    if folder is None or target.built() is not None:
        return None
    for level in target.levels():
        file = folder / library_name(level)
        if file.exists():
            with suppress(OSError):  # the system cannot load it
                own = ctypes.CDLL(str(file))
                if not mark() or hasattr(own, mark()):
                    return own
    return None


def _table() -> np.ndarray:
    """See settings.py. Compiled code finds the table by its name, which a library defines."""
    own = library()
    if own is None:
        return np.zeros(WORDS, np.int64)
    return np.ctypeslib.as_array((ctypes.c_int64 * WORDS).in_dll(own, TABLE))


table: Final = _table()


@lru_cache(maxsize=1)
def can_compile() -> bool:
    """Whether numba is there, and works, for what the library lacks. Without a library, ``what_is_missing`` knows."""
    if library() is None or find_spec("numba") is None:
        return library() is None
    try:
        import numba  # noqa: F401
    except ImportError:  # it does not support the installed NumPy
        return False
    return True


def is_ready(module: str, *key: object) -> bool:
    """Whether the library has a function."""
    return library() is not None and hasattr(library(), symbol(name_of(module, *key)))


def made_for(module: str, *key: object) -> str:
    """The processors that a function is compiled for."""
    own = library()
    if own is None or not is_ready(module, *key):
        return "this processor"
    return next(level for level in target.LEVELS if Path(own._name).name == library_name(level))


def name_of(module: str, *key: object) -> str:
    return "-".join((module, *map(str, key)))


def address(module: str, *key: object) -> int:
    """The address of the C function that ``compiled(*key)`` of a module of rmsnorm.cpu describes.

    All its arguments are 64-bit integers, and so is its result.
    """
    name = name_of(module, *key)
    result = _addresses.get(name)
    if result is None:
        with _lock:
            result = _addresses.get(name)
            if result is None:
                result = _addresses[name] = _found(name) or _compiled(name, module, key)
    return result


def known() -> dict[str, int]:
    """The addresses of the functions that this process has asked for, by name."""
    return dict(_addresses)


def _found(name: str) -> int:
    """The address of a function of the library; 0 if it lacks the function."""
    try:
        return ctypes.cast(getattr(library(), symbol(name)), ctypes.c_void_p).value or 0
    except AttributeError:  # or there is no library
        return 0


def described(module: str, *key: object) -> Any:
    """The function, which numba can compile."""
    return import_module(f"rmsnorm.cpu.{module}").compiled(*key)


def _compiled(name: str, module: str, key: tuple[object, ...]) -> int:
    from rmsnorm.cpu import cache, compiler

    code = cache.read(name)
    if code is None:
        code = compiler.object_of(symbol(name), lambda: described(module, *key), table.ctypes.data)
        cache.write(name, code)
    return compiler.load(symbol(name), code, table.ctypes.data)


class Key(NamedTuple):
    """A kernel is compiled for formats, the OPTIONS of a call, and a gate of GATES. Empty or None: it has none."""

    kind: str
    x: str
    y: str
    norm: str | None = None
    product: str | None = None
    options: tuple[str, ...] = ()
    gate: str = ""

    @property
    def place(self) -> int:
        """The place of the kernel in the table."""
        formats = CODE[self.x] - 1, CODE[self.y] - 1, CODE[self.norm], CODE[self.product]
        options = sum(2 ** OPTIONS.index(name) for name in self.options)
        place = KINDS.index(self.kind), *formats, options, _GATES.index(self.gate)
        return KERNELS + int(np.ravel_multi_index(place, _SHAPE))

    @property
    def function(self) -> tuple[str, ...]:
        """The module, and what its ``compiled`` takes."""
        gate = (self.gate,) if self.gate else ()
        return self.kind, self.x, self.y, self.norm or "", self.product or "", *self.options, *gate

    @property
    def settles(self) -> tuple[str, str]:
        """The formats of what computes a row of dx again: with a gate one of the rows is in float64."""
        x = "float64" if "before" in self.gate else self.x
        return x, "float64" if "after" in self.gate else self.y

    def address(self) -> int:
        """The address of the kernel, which is then in the table."""
        if self.kind == "backward":
            later(cancelled_place(*self.settles), "cancelled", *self.settles)
        result = table[self.place] = address(*self.function)
        return result


def later(place: int, module: str, *key: str) -> None:
    """Puts into the table a function that compiles the real one when it is first called, and takes its place: most
    programs never call it. What the library has is there at once."""
    if table[place]:
        return
    if is_ready(module, *key):
        table[place] = address(module, *key)
        return

    def first(*arguments: int) -> int:
        try:
            table[place] = address(module, *key)
            result: int = signature(int(table[place]))(*arguments)
            return result
        except BaseException:
            sys.excepthook(*sys.exc_info())  # compiled code has called this, and knows no exceptions
            return 1

    signature = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 9)
    _stubs.append(signature(first))
    table[place] = ctypes.cast(_stubs[-1], ctypes.c_void_p).value or 0


def symbol(name: str) -> str:
    return f"rmsnorm_{name}"


def _renew_lock() -> None:
    global _lock
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)  # another thread of the parent may have had it
