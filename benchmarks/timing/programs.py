"""What the programs that time backends share: options, the run of each backend, and the files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rmsnorm.cli.reports import file
from rmsnorm.cli.usage import DIFFERS, UNUSABLE, progress
from timing.files import write_json, write_summary
from timing.run import BenchRun, run

_measured = partial(typer.Option, rich_help_panel="How it is measured")
Threads = Annotated[int | None, _measured(help="Cores to use.", min=1, show_default="all")]
Seconds = Annotated[
    float,
    _measured(help="Seconds for a cell, for all its candidates together.", min=0.0),
]
Summary = Annotated[
    Path | None,
    file(help="Write one line of JSON for each record, in few digits."),
]


def run_each(
    commands: Mapping[str, Sequence[str]], totals: Mapping[str, int], keep: Callable[[list[BenchRun]], None]
) -> list[BenchRun]:
    """Run the worker of each backend, one after the other, with a bar for its cells, until the user stops one.

    ``keep`` is called after every cell with all runs, so that what is finished is kept however this process ends.
    It may print: the bar is taken away meanwhile.
    """
    runs: list[BenchRun] = []

    def follow(state: BenchRun) -> None:
        if state.records:
            if not shown.disable:
                shown.stop()
            keep([*runs, state])
            if not shown.disable:
                shown.start()
        if shown.disable and state.cells > shown.tasks[bars[state.name]].completed:  # a file or a pipe
            print(f"{state.name} {state.cells}/{totals[state.name]}", file=sys.stderr, flush=True)
        shown.update(bars[state.name], completed=state.cells)

    with progress("cells") as shown:
        bars = {name: shown.add_task(name, total=totals[name], start=False) for name in commands}
        for name, bar in bars.items():
            shown.start_task(bar)
            runs.append(run(name, commands[name], asked=totals[name], on_progress=follow))
            if runs[-1].status == "stopped":
                break
    return runs


def write(
    runs: Sequence[BenchRun],
    settings: Mapping[str, Any],
    json: Path | None,
    summary: Path | None,
    is_over: bool = False,
) -> None:
    """Write the files that were asked for; into what is no file, such as a pipe, only when the runs are over."""
    for path, function in ((json, write_json), (summary, write_summary)):
        if path and (is_over or path.is_file() or not path.exists()):
            function(runs, settings, path)


def end(runs: Sequence[BenchRun], requested: Sequence[str] | None) -> None:
    """Exit with status 1 or 2 if a run failed."""
    states = {state.status for state in runs}
    if states & {"crashed", "hung", "stopped"} or any(state.failures for state in runs):
        raise typer.Exit(DIFFERS)
    if "refused" in states or ("absent" in states and requested):
        raise typer.Exit(UNUSABLE)
