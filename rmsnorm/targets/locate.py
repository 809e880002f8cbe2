"""Imports what ``module:attribute`` or ``file.py:attribute`` names."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import types
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rmsnorm.specification import errors
from rmsnorm.targets.target import NoTarget

_read: Final[dict[str, bytes]] = {}  # by the name of a file's module: its text
_RELATIVE: Final = ": name a file of a package as package.module:attribute, in the folder that has the package"


def locate(name: str) -> Any:
    """Import the object that ``module:attribute`` or ``file.py:attribute`` names.

    Raises:
        NoTarget: the module cannot be imported, or has no such attribute.
    """
    module_name, colon, attribute = name.rpartition(":")
    if not colon or not module_name or not attribute:
        fix = f"; name what it has, as {name}:NAME" if name.endswith(".py") else ""
        raise NoTarget(f"target is {name!r}, expected module:attribute such as torch.nn:RMSNorm, or an .onnx file{fix}")
    try:
        load = _from_file if module_name.endswith(".py") else importlib.import_module
        module: Any = load(module_name)
    except (Exception, SystemExit) as error:  # a module may raise anything when it is imported
        missing = isinstance(error, FileNotFoundError) or (
            isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        )
        relative = _RELATIVE * ("no known parent" in str(error))
        fix = "check the name" if missing else f"let Python import it first{relative}"
        raise NoTarget(f"{module_name} cannot be imported ({raised(str(error), error)}); {fix}") from error
    for part in attribute.split("."):
        if not hasattr(module, part):
            raise NoTarget(f"{module_name} has no {attribute!r}; check the name")
        module = getattr(module, part)
    return module


def raised(text: str, error: BaseException) -> str:
    """The type of an error, and a text of it that a terminal can show."""
    return f"{type(error).__name__}: {errors.printable(text)}"


def _from_file(name: str) -> types.ModuleType:
    """The module of a file: one that is imported already, or its own under a name that no other file has.

    It is loaded again where its text is another one by now; what it imports stays as it was imported first.
    """
    path = Path(name)
    own_name = f"{path.stem}_{zlib.crc32(os.fsencode(path.resolve())):08x}"
    spec = importlib.util.spec_from_file_location(own_name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    text = path.read_bytes()
    for known in (own_name, path.stem):
        loaded = sys.modules.get(known)
        if getattr(loaded, "__file__", None) == spec.origin and _read.setdefault(own_name, text) == text:
            return loaded  # type: ignore[return-value]
    module = importlib.util.module_from_spec(spec)
    sys.modules[own_name] = module  # where dataclasses and pickle look for it
    try:
        with _beside(path):
            exec(compile(text, str(spec.origin), "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[own_name]
        raise
    _read[own_name] = text
    return module


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[None]:
    """Its folder comes first where modules are looked for, as if Python ran the file; later, it comes last."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)  # for what the file imports when it is called
