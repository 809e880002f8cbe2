"""The file that ``check`` and ``selftest`` write."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rmsnorm.parity.comparison import Run

file = partial(typer.Option, dir_okay=False, rich_help_panel="Reports")
Json = Annotated[Path | None, file(help="Write every record as JSON.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print everything.", rich_help_panel="Reports")]


def write_reports(runs: Sequence[Run], json: Path | None) -> None:
    """Write the comparisons to the file that was asked for."""
    from rmsnorm.parity import report

    if json:
        report.write_json(runs, json)
