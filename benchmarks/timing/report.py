"""What the benchmark measured, as rows for a terminal or a pipe, each cell as soon as it is there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from rmsnorm.specification import dtypes
from timing.backends import BACKENDS
from timing.run import BenchRun

# The width of each column is fixed, because a row is printed before the next cell is measured.
_COLUMNS: Final = {
    "": 20, "ms": 8, "built-in / it": 13, "LayerNorm / it": 14, "it / copy": 9, "right bits %": 14, "max ulp": 14,
    "first s": 7,
}  # fmt: skip
WIDTH: Final = sum(_COLUMNS.values()) + len(_COLUMNS) - 1  # columns of a terminal that a row needs
_QUIET: Final = 0.1  # cores that other processes use; one busy core of two has caused ratios of hundreds
_LEGEND: Final = (
    "ms: median. built-in / it: how many times faster than the built-in layer, run in the same way; LayerNorm / it: "
    "than LayerNorm. it / copy: how many times slower than a copy to new memory, whose pages the system must first "
    "provide. right bits, max ulp: of y/dx/dscale, against the right result for the candidate's own variant; y and dx "
    "in a sample of rows. first: the first call, with its compilation. -: not known. --summary has percentiles, a copy "
    "to memory in use, and bytes a second."
)


class Printer:
    """Prints each cell when it is measured, and at the end what the columns mean and how each backend ended.

    Call it with all runs after every cell.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._printed: dict[str, int] = {}  # records, by backend

    def __call__(self, runs: Sequence[BenchRun]) -> None:
        run = runs[-1]
        done = self._printed.get(run.name, 0)
        cell = run.records[done:]
        if not cell:
            return
        if not done:
            title = f"{BACKENDS[run.name].title} {run.version} on {run.device}"
            self.console.print(Text(f"{title}\n{_line(tuple(_COLUMNS))}", style="bold"))
        self.console.print(Text(_cell(cell[0]), style="bold"))
        for record in cell:
            self.console.print(Text(_line(_row(record)), style="green" if record["ours"] else ""))
        self._printed[run.name] = len(run.records)

    def end(self, runs: Sequence[BenchRun]) -> None:
        if self._printed:
            self.console.print(Text(f"\n{_LEGEND}", style="dim"))
        for run in runs:
            self.console.print(outcome(run))


def _line(cells: Sequence[str]) -> str:
    """The cells of a row in the widths of the columns; the first one is left-justified."""
    widths = tuple(_COLUMNS.values())
    numbers = (text.rjust(width) for text, width in zip(cells[1:], widths[1:], strict=False))
    return " ".join((cells[0].ljust(widths[0]), *numbers))


def _row(record: Mapping[str, Any]) -> list[str]:
    timing = record["timing"]
    if timing is None:
        return [f"  {record['candidate']}", record["status"]]
    return [
        f"  {record['candidate']}",
        ms(timing["median"]),
        times(record["speedup"]),
        times(record["layer_norm_speedup"]),
        times(record["over_copy"]),
        "/".join(_percent(share) for share in record["bits"].values()) or "-",
        "/".join(f"{ulps:.0f}" if ulps < 1e6 else f"{ulps:.0e}" for ulps in record["max_ulp"].values()) or "-",
        f"{record['first_call']:.3f}",
    ]


def outcome(run: BenchRun) -> Text:
    notes = [
        f"\n  {record['candidate']} {record['status']}, {_cell(record)}: {record['detail']}"
        for record in run.records
        if record["status"] != "timed"
    ]
    busy = {_cell(record): record["others"] for record in run.records if (record["others"] or 0.0) > _QUIET}
    if busy:
        notes.append(
            f"\n  other processes used up to {max(busy.values()):.1f} cores; measure again on a quiet machine: "
            + ", ".join(busy)
        )
    style = {"done": "red" if run.failures else "yellow" if busy else "green", "absent": "yellow"}.get(
        run.status, "red"
    )
    after = f" after {run.cells} cells" if run.status == "crashed" else ""
    what = f"{run.cells} cells" if run.status == "done" else run.message
    return Text(
        f"{BACKENDS[run.name].title} {run.status}{after}: {what} ({run.seconds:.0f} s){''.join(notes)}",
        style=style,
    )


def _cell(record: Mapping[str, Any]) -> str:
    return f"{record['op']} {'x'.join(map(str, record['shape']))} {dtypes.short(record['dtype'])}"


def ms(seconds: float) -> str:
    return three_digits(1e3 * seconds)


def times(ratio: float | None) -> str:
    return "-" if ratio is None else three_digits(ratio)


def three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:#.3g}"


def _percent(share: float) -> str:
    return "100" if share == 1 else f"{math.floor(1000 * share) / 10:.1f}"  # 99.96 % is not 100 %
