"""What the benchmark measured, as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rmsnorm.specification import dtypes
from timing.backends import BACKENDS
from timing.run import BenchRun

_COLUMNS: Final = (
    "", "ms", "built-in / it", "LayerNorm / it", "it / copy", "right bits %", "max ulp", "first s",
)  # fmt: skip
WIDTH: Final = 100  # columns that the widest table needs
_QUIET: Final = 0.1  # cores that other processes use; one busy core of two has caused ratios of hundreds
_LEGEND: Final = (
    "ms: median. built-in / it: how many times faster than the built-in layer, run in the same way; LayerNorm / it: "
    "than LayerNorm. it / copy: how many times slower than a copy to new memory, whose pages the system must first "
    "provide. right bits, max ulp: of y/dx/dscale, against the right result for the candidate's own variant; y and dx "
    "in a sample of rows. first: the first call, with its compilation. -: not known. --summary has percentiles, a copy "
    "to memory in use, bytes a second, and memory."
)


def terminal(runs: Sequence[BenchRun]) -> RenderableType:
    """A table for every backend that ran, and one line about every backend."""
    parts: list[RenderableType] = []
    for run in runs:
        cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for record in run.records:
            cells.setdefault((record["op"], *record["shape"], record["dtype"]), []).append(record)
        if cells:
            parts.append(_table(run, cells.values()))
    if parts:
        parts.append(Text(_LEGEND, style="dim"))
    return Group(*parts, *(outcome(run) for run in runs))


def _table(run: BenchRun, cells: Iterable[Sequence[Mapping[str, Any]]]) -> Table:
    title = f"{BACKENDS[run.name].title} {run.version} on {run.device}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for cell in cells:
        first = cell[0]
        table.add_row(Text(_cell(first), style="bold"))
        for record in cell:
            table.add_row(*_row(record), style="green" if record["ours"] else "")
        table.add_section()
    return table


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
