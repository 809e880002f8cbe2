"""Writes docs/support.md from docs/support.toml: python docs/support.py"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
BACKENDS = {"numpy": "NumPy", "torch": "PyTorch", "keras": "Keras 3", "flax": "Flax"}
INTRODUCTION = """# What works

This page lists what works in each framework. A ✓ links to a test that shows it; the name of the test appears when the
pointer is on the ✓. **Bold** means that the framework's own RMSNorm does not have the feature, or has it wrong.
`-` means that the question does not apply. Numbers in brackets are the remarks at the end of the page.

`python docs/support.py` makes this page from [support.toml](support.toml). A test compares the two and checks that
every named test exists.
"""


def page() -> str:
    sections = tomllib.loads((DOCS / "support.toml").read_text())
    lines = [INTRODUCTION]
    notes: list[str] = []
    for title, features in sections.items():
        lines += [f"## {title}", "", f"| | {' | '.join(BACKENDS.values())} |", "| --- " * (len(BACKENDS) + 1) + "|"]
        for feature, cells in features.items():
            beyond = cells.get("beyond", [])
            row = [_cell(cells.get(name), name in beyond, notes) for name in BACKENDS]
            lines.append(f"| {feature} | {' | '.join(row)} |")
        lines.append("")
    lines += ["## Remarks", "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    return "\n".join(lines) + "\n"


def tests(cell: Any) -> list[str]:
    """The tests that a cell names."""
    return [] if cell is None or _is_no(cell) else [part.strip() for part in cell.split(";")[0].split(",")]


def _is_no(cell: str) -> bool:
    return cell.startswith("no:")


def _cell(cell: str | None, beyond: bool, notes: list[str]) -> str:
    if cell is None:
        return "-"
    links = " ".join(f"[✓](../tests/{test.split('::')[0]} '{test.split('::')[1]}')" for test in tests(cell))
    text, _, remark = ("no", "", cell[3:].strip()) if _is_no(cell) else (links, *cell.partition(";")[1:])
    if beyond:
        text = f"**{text}**"
    if remark.strip():
        if remark.strip() not in notes:
            notes.append(remark.strip())
        text += f" ({notes.index(remark.strip()) + 1})"
    return text


if __name__ == "__main__":
    (DOCS / "support.md").write_text(page())
