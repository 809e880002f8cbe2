"""The files that ``check`` and ``vectors check`` write, and the folders for these and all others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rmsnorm.cli.usage import unusable
from rmsnorm.files import replacing

if TYPE_CHECKING:
    from rmsnorm.parity.comparison import Run

file = partial(typer.Option, dir_okay=False, rich_help_panel="Reports")
Json = Annotated[Path | None, file(help="Write every record as JSON.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print everything.", rich_help_panel="Reports")]


def check_folders(command: str, *paths: Path | None) -> None:
    """Exit if there is no folder for a file, or none can be written into it: before the work, not after it."""
    for path in paths:
        if path is None:
            continue
        if not path.parent.is_dir():
            raise unusable(f"{command}: {path.parent} is not a folder, expected one to write {path.name} in")
        with replacing(path):  # which makes a temporary folder beside it, and here replaces nothing
            pass


def write_reports(runs: Sequence[Run], json: Path | None) -> None:
    """Write the comparisons to the file that was asked for."""
    from rmsnorm.parity import report

    if json:
        report.write_json(runs, json)
