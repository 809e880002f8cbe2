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

# by the name of a file's module: the file and the text of each module that came with it
_read: Final[dict[str, dict[str, tuple[Path, bytes]]]] = {}
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

    It is loaded again, with what it imports from its own folder, where one of these files is another one by now.
    """
    path = Path(name)
    own_name = f"{path.stem}_{zlib.crc32(os.fsencode(path.resolve())):08x}"
    spec = importlib.util.spec_from_file_location(own_name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    read = _read.get(own_name, {})
    if all(_text(file) == text for file, text in read.values()):
        for name in (own_name, path.stem):
            loaded = sys.modules.get(name)
            if loaded is not None and getattr(loaded, "__file__", None) == spec.origin:
                _read.setdefault(own_name, {name: (path, _text(path))})
                return loaded
    for edited, (file, _) in read.items():
        sys.modules.pop(edited, None)
        with contextlib.suppress(OSError):  # which tells an edit by the second and the size alone
            Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
    module, before, text = importlib.util.module_from_spec(spec), {*sys.modules}, path.read_bytes()
    sys.modules[own_name] = module  # where dataclasses and pickle look for it
    try:
        with _beside(path):
            exec(compile(text, str(spec.origin), "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[own_name]
        raise
    _read[own_name] = {own_name: (path, text)} | {
        name: (beside, _text(beside))
        for name in {*sys.modules} - before - {own_name}
        if (beside := _file_beside(name, path.resolve().parent)) is not None
    }
    return module


def _file_beside(name: str, folder: Path) -> Path | None:
    """The file of a module that lies in a folder, or in a package there; of this package, which is no target, none."""
    top, file = (getattr(sys.modules.get(part), "__file__", None) for part in (name.partition(".")[0], name))
    if not (top and file) or name.partition(".")[0] == __name__.partition(".")[0]:
        return None
    place = Path(top).resolve()
    return Path(file) if folder == (place.parent.parent if place.name == "__init__.py" else place.parent) else None


def _text(path: Path) -> bytes:
    """The bytes of a file; none where it is gone, or is no file."""
    return path.read_bytes() if path.is_file() else b""


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
