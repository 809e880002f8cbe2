"""One page of several runs, in Markdown."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.figures import FIGURES
from experiments.results import table
from rmsnorm.files import read_json, reading

_WANTED = "a summary of python -m experiments"


def page(folders: Sequence[Path], beside: Path) -> str:
    """The page, whole: what stands in a file of its name is lost. Links to figures begin at the folder ``beside``.

    Raises:
        FileNotFoundError: a folder has no summary.
        ValueError: a summary is damaged.
    """
    parts = [
        "# The paper's experiments",
        "Written by `python -m experiments report`; another run of it replaces this page.",
    ]
    for folder in folders:
        path = folder / "summary.json"
        result = read_json("report", path, _WANTED)
        with reading("report", path, _WANTED):
            parts += _section(result, Path(os.path.relpath(folder, beside)))
    return "\n\n".join(parts) + "\n"


def _section(result: Mapping[str, Any], folder: Path) -> Iterator[str]:
    options, machine = result["options"], result["environment"]
    columns, rows = table(result)
    yield f"## {folder.name}: {result['title']}"
    yield "\n".join(_line(row) for row in (columns, ["---"] * len(columns), *rows))
    yield (
        f"{result['quality']} after {options['steps']:,} steps, mean ± standard deviation over the seeds "
        f"{', '.join(map(str, result['seeds']))}; the time is the median over the steps, in which the norms took turns."
    )
    yield " ".join(f"![{name.removesuffix('.svg')}]({(folder / name).as_posix()})" for name in FIGURES)
    chosen = ", ".join(f"{name} {value}" for name, value in {**options, **result["facts"]}.items())
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    yield f"{chosen}; {result['peak_memory'] / 2**20:.0f} MiB at most in memory."
    yield f"{machine['processor']}, {machine['cores']} cores, {machine['date'][:10]}, {versions}."


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
