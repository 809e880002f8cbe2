"""Reads which file of a package imports which: at the top, inside functions, for types only, and by name.

``import_module("rmsnorm.x")`` and ``[..., "-m", "rmsnorm.x"]`` are also imports. A value in an f-string can be any
name: ``f"rmsnorm.{folder}"`` imports all modules of that form, unless the caller says which ones.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType


def modules_of(folder: Path) -> dict[str, Path]:
    """The files of a package, by the names of the modules."""
    names = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports_of(folder: Path, by_name: Mapping[str, str] = MappingProxyType({})) -> dict[str, set[str]]:
    """The modules of the package that each of its modules imports.

    Args:
        folder: of the package.
        by_name: for modules that build names at run time, a regular expression for the modules that they can mean.
    """
    modules = modules_of(folder)
    graph = {}
    for name, path in modules.items():
        names = set(_written(path, folder.name))
        targets = {target for written in names for target in _resolved(written, modules)}
        if any(is_pattern(written) for written in names) and name in by_name:
            targets = {target for written in names if not is_pattern(written) for target in _resolved(written, modules)}
            targets |= {target for target in modules if re.fullmatch(by_name[name], target)}
        graph[name] = targets - {name}
    return graph


def is_pattern(written: str) -> bool:
    """Whether the name is built at run time."""
    return "*" in written


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, each group sorted."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        reached[start], queue = set(), [start]
        while queue:
            for target in graph.get(queue.pop(), ()):
                if target not in reached[start]:
                    reached[start].add(target)
                    queue.append(target)
    groups = {frozenset(b for b in reached[a] if a in reached.get(b, ())) for a in graph if a in reached[a]}
    return sorted(sorted(group) for group in groups)


def _written(path: Path, package: str) -> Iterator[str]:
    """The names of modules, or of objects in modules, that the file imports; ``*`` stands for any name."""
    parents = (package, *path.relative_to(next(p for p in path.parents if p.name == package)).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = [*parents[: len(parents) - node.level + 1]] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield _text(node.args[0])
        elif isinstance(node, ast.List):
            texts = [_text(entry) for entry in node.elts]
            yield from (text for flag, text in pairwise(texts) if flag == "-m")


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "*" for part in node.values)
    return ""


def _resolved(written: str, modules: Mapping[str, Path]) -> Iterator[str]:
    """The modules that a name stands for: the module itself, or the module that contains the object."""
    if is_pattern(written):
        pattern = re.compile(re.escape(written).replace(r"\*", r"[\w.]+"))
        yield from (name for name in modules if pattern.fullmatch(name))
        return
    while written:
        if written in modules:
            yield written
            return
        written = written.rpartition(".")[0]
