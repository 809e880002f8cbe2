"""For mkdocs: docstrings as they are written here, in the form that mkdocstrings reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from textwrap import dedent, indent
from typing import Any

import griffe

ENTRY = re.compile(r"^    (?P<names>[a-z_]+(?:(?:, | and )[a-z_]+)*): (?P<text>.*(?:\n(?:     .*|$))*)", re.MULTILINE)
ARGUMENTS = re.compile(r"^(?:Args|Attributes):\n(?:    .*\n?|\n(?=    ))+", re.MULTILINE)
EXAMPLE = re.compile(r"^>>> (?:.+\n?)+", re.MULTILINE)  # without a title


class Docstrings(griffe.Extension):
    """Arguments that are described together get an entry each, with their own types and defaults."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for framework in ("numpy", "torch", "tf", "flax"):
            module: Any = pkg[f"{framework}_impl.functional"]
            for name, function in _declared(pkg["specification.interface"].filepath).items():
                module.set_member(name, function)
        for item in _items(pkg):
            known = [parameter.name.lstrip("*") for parameter in getattr(item, "parameters", ())]
            text = re.sub(r"^Example:$", "Examples:", item.docstring.value, flags=re.MULTILINE)
            text = EXAMPLE.sub(lambda match: "Examples:\n" + indent(match[0], "    "), text)
            if item.is_class:  # its "Returns" is of its call, of which griffe knows no type
                text = re.sub(r"^Returns:$", "Its call returns:", text, flags=re.MULTILINE)
            item.docstring.value = ARGUMENTS.sub(lambda match, known=known: _apart(match[0], known), text)


def _declared(path: Any) -> dict[str, Any]:
    """The functions of every framework, which are inside the function that declares them."""
    text = path.read_text(encoding="utf-8")
    outer = next(f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef) and f.name == "declared")
    inner = [
        dedent(str(ast.get_source_segment(text, f, padded=True))) for f in outer.body if isinstance(f, ast.FunctionDef)
    ]
    code = "\n\n".join(inner).replace("{make}", "from numpy import array")
    return dict(griffe.visit("functional", filepath=path, code=code).members)


def _items(item: griffe.Object) -> Iterator[Any]:
    if item.docstring is not None:
        yield item
    for member in item.members.values():
        if not member.is_alias:
            yield from _items(member)


def _apart(section: str, known: list[str]) -> str:
    """``x, scale: text`` as two entries; ``options`` is every argument that has no entry of its own."""
    same = [entry for entry in ENTRY.finditer(section) if entry["text"].startswith("as for ")]
    named = {name for entry in ENTRY.finditer(section) for name in re.split(", | and ", entry["names"])}

    def entries(match: re.Match[str]) -> str:
        names = []
        for name in re.split(", | and ", match["names"]):
            left = [other for other in known if other not in named | {"self", "unknown"}]
            names += [name] if name in known or name != "options" or section.startswith("Attr") else left
        text = match["text"].rstrip()
        return "\n".join(f"    {name}: {text}" for name in names) + match["text"][len(text) :]

    for entry in same:  # which would say the same of each of them
        section = section.replace(entry[0].rstrip() + "\n", "", 1)
    if section.strip() == "Args:":
        section = ""
    others = "".join(f"\nThe other arguments are {' '.join(entry['text'].split())}\n" for entry in same)
    return ENTRY.sub(entries, section) + others
