"""A name says what it holds: words that say only that something was obtained, or that are jargon of this project."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [path for folder in ("rmsnorm", "experiments") for path in sorted((ROOT / folder).rglob("*.py"))]
AVOIDED = {
    *("found", "given", "each", "told", "held", "ahead", "ready", "places", "at", "here", "there", "mine", "taken"),
    *("brain", "crew", "team", "notebook", "opening", "roles", "yardstick", "foreign"),
}


def bound(tree: ast.AST) -> Iterator[str]:
    """Every name that a file gives to something: variables, arguments, attributes, functions, classes, imports."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).rpartition(".")[2]


def avoided(tree: ast.AST) -> set[str]:
    return {name for name in bound(tree) if name.strip("_").lower() in AVOIDED}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_say_what_they_hold(path):
    assert path.stem not in AVOIDED
    assert not avoided(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "line", ["found = 1", "for each in x: pass", "def f(given): pass", "self.told = 1", "_HERE = 1", "import a as crew"]
)
def test_such_a_name_is_seen(line):
    assert len(avoided(ast.parse(line))) == 1
