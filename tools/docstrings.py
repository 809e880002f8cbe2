"""For mkdocs: docstrings as they are written, with a list for their arguments, and the functions of every framework."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import griffe

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Example):\n((?:    .*\n?|\n(?=    ))+)", re.MULTILINE)
ENTRY = re.compile(r"^(?P<names>[\w*]+(?:(?:, | and )[\w*]+)*): ", re.MULTILINE)
EXAMPLE = re.compile(r"^>>> (?:.+\n?)+", re.MULTILINE)


class Docstrings(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        declared = _declared(Path(str(pkg["specification.interface"].filepath)))
        for name, function in declared.items():
            pkg["numpy_impl.functional"].set_member(name, function)
        for item in _items(pkg):
            item.docstring.value = EXAMPLE.sub(_as_code, SECTION.sub(_as_list, item.docstring.value))


def _declared(path: Path) -> dict[str, Any]:
    """The functions of every framework, which are inside the function that declares them."""
    text = path.read_text(encoding="utf-8")
    outer = next(f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef) and f.name == "declared")
    inner = (ast.get_source_segment(text, f, padded=True) for f in outer.body if isinstance(f, ast.FunctionDef))
    code = "\n\n".join(dedent(str(part)) for part in inner).replace("{make}", "from numpy import array")
    return dict(griffe.visit("functional", filepath=path, code=code).members)


def _items(item: griffe.Object) -> Iterator[Any]:
    if item.docstring is not None:
        yield item
    for member in item.members.values():
        if not member.is_alias:
            yield from _items(member)


def _as_list(section: re.Match[str]) -> str:
    """A section of a docstring in Markdown: a title and, of arguments, a list."""
    text = dedent(section[2])
    if section[1] in ("Args", "Attributes", "Raises"):
        text = ENTRY.sub(lambda entry: f"- **{entry['names'].replace('*', '')}**: ", text)
    return f"**{section[1]}**\n\n{text}"


def _as_code(example: re.Match[str]) -> str:
    return f"```pycon\n{example[0].rstrip()}\n```\n"
