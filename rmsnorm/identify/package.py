"""The norms of a package: read from its source, to be built small and identified."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

from rmsnorm.identify.identity import Identity
from rmsnorm.identify.solve import identify_opened
from rmsnorm.specification import errors
from rmsnorm.targets.apart import look_in_current_folder
from rmsnorm.targets.open import open_target
from rmsnorm.targets.target import NoTarget

_NAMED: Final = re.compile(r"rms_?norm", re.IGNORECASE)
_NORM: Final = re.compile(r"Norm$")
# the name of a class and its body, which ends at the next line without an indent
_CLASS: Final = re.compile(r"^class (\w+)[^\n]*\n((?:(?:[ \t][^\n]*)?\n)+)", re.MULTILINE)
_CALL: Final = re.compile(r"^[ \t]+def (?:forward|call|__call__)\b", re.MULTILINE)
_ROOT: Final = re.compile(r"rsqrt|sqrt|-0\.5")


def norms(package: str, **options: Any) -> Iterator[tuple[str, Identity | str]]:
    """Each class with RMSNorm in its name, and the other norms of the package that are one.

    With its identity, or with the sentence on why it cannot be asked; ``options`` are those of ``identify_as``.

    Raises:
        NoTarget: there is no such package.
    """
    named, others = find(package)
    for name in [*named, *others]:
        result: Identity | str
        look_in_current_folder(name)
        try:
            result = identify_as(name, **options)
        except errors.InputError as error:
            result = str(error)
        if name in named or (isinstance(result, Identity) and result.kind in ("rmsnorm", "l2norm")):
            yield name, result


def identify_as(
    target: str, *, time_limit: float, gradients: bool = True, compiled: bool = False, **options: Any
) -> Identity:
    """The identity of a target by its name; options of ``open_target``.

    compiled: whether what the compiler of its framework makes of it is identified.
    """
    opened = open_target(target, **options)
    asked = opened.compiled if compiled else opened
    return identify_opened(asked, width=options.get("width"), gradients=gradients, time_limit=time_limit)


def find(package: str) -> tuple[list[str], list[str]]:
    """Classes of a package, a module or a file: those named RMSNorm, and other norms with a root in their source.

    Their names are those that ``open_target`` takes.

    Raises:
        NoTarget: there is no such package.
    """
    root = Path(package)
    if root.suffix != ".py" or not root.is_file():
        origin = _origin(package)
        if origin is None:
            raise NoTarget(
                f"identify: package {package!r} is not installed, expected one that can be imported; check the name "
                "(of a function or a class, module:attribute)"
            )
        root = origin
    files = sorted(root.parent.rglob("*.py")) if root.name == "__init__.py" else [root]
    named: list[str] = []
    others: list[str] = []
    for file in files:
        inside = file.relative_to(root.parent)
        if "test" in file.name or "tests" in inside.parts:
            continue
        text = file.read_text(errors="ignore")
        if "Norm" not in text and not _NAMED.search(text):
            continue
        parts = inside.with_suffix("").parts if root.name == "__init__.py" else ()
        if any(part.startswith("modular_") for part in parts):
            continue  # transformers generates its modeling files from these
        module = ".".join([package, *(part for part in parts if part != "__init__")])
        for name, body in _CLASS.findall(text):
            if _CALL.search(body) and _NAMED.search(name):
                named.append(f"{module}:{name}")
            elif _CALL.search(body) and _NORM.search(name) and _ROOT.search(body):
                others.append(f"{module}:{name}")
    return named, others


def _origin(package: str) -> Path | None:
    """The file of a package, found as an import finds it, whose path begins with the folder that it is called in.

    Nothing is imported, as its classes may be asked in another process.
    """
    top, *inner = package.split(".")
    spec = PathFinder.find_spec(top, [str(Path.cwd())])
    with contextlib.suppress(ImportError, ValueError):
        spec = spec or importlib.util.find_spec(top)  # of a name without dots nothing is imported
    for count in range(len(inner)):
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        spec = PathFinder.find_spec(".".join([top, *inner[: count + 1]]), folders)
    return Path(spec.origin) if spec is not None and spec.origin else None
