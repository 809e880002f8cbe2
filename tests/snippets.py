"""The Python in a page, as a reader runs it: as it stands, in an empty folder, by pytest where it is a test."""

from __future__ import annotations

import importlib.util
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest
from programs import printed

ROOT = Path(__file__).parents[1]
_NEEDS = {
    "torch": "torch", "tf_impl": "tensorflow", "jax": "jax", "flax": "flax", "transformers": "transformers",
    "matplotlib": "matplotlib", "onnxruntime": "onnxruntime", "torch.onnx": "onnxscript",
}  # fmt: skip


def snippets(page: Path, kind: str = "python") -> list[str]:
    """The text of every block of a language in a page."""
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[tuple[list[str], str]]:
    """The arguments of every ``$ rmsnorm ...`` in a text, and the lines that stand below it."""
    found = re.findall(r"^    \$ rmsnorm (.*)\n((?:    (?!\$).*\n)*)", text, re.MULTILINE)
    return [(shlex.split(typed), textwrap.dedent(lines)) for typed, lines in found]


def stands_for(shown: str) -> re.Pattern[str]:
    """The outputs that a page may show so: a line ``...`` is any lines, other dots are any words.

    Spaces do not count, as a table is as wide as its longest line.
    """
    lines = []
    for line in shown.splitlines():
        words = [".*" if word == "..." else re.escape(word) for word in line.split()]
        lines.append(r"(?:.*\n)*?" if words == [".*"] else r"[ ]*" + r"[ ]+".join(words) + r"[ ]*\n")
    return re.compile("".join(lines))


def run(code: str, names: dict[str, Any], folder: Path) -> None:
    """Run a snippet in a folder, which is the current one and empty before the first snippet of a page.

    One whose first line is the name of a file becomes that file. One with a test is a file that pytest runs. ``names``
    are those that the snippets before it have defined.
    """
    for word, package in _NEEDS.items():
        if word in code and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    named = re.match(r"# (\S+\.py)\n", code)
    if named is not None or "\ndef test_" in code:
        path = folder / (named.group(1) if named else "test_snippet.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(code, encoding="utf-8")
        if "\ndef test_" in code:
            said = printed("-m", "pytest", "-q", "-p", "no:cacheprovider", path, cwd=folder, path=ROOT)
            assert " passed" in said, said
        return
    exec(compile(code, "snippet", "exec"), names)
