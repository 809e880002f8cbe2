"""Tables: whole in a pipe or a file, one line a row without spaces at its end; in a terminal as wide as that is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import IO, Any, Final, cast

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

WHOLE: Final = 10_000  # columns; no line is longer
_FILLING: Final = re.compile(r" +$|(?<=─{80})─+ *$", re.MULTILINE)  # spaces, and a rule behind 80 columns


def console(*, least: int = 0, **options: Any) -> Console:
    """A console as wide as the terminal, or as ``least``; without one nothing is cut, broken or padded."""
    shown = Console(**options)
    if shown.is_terminal:
        return Console(width=max(shown.width, least), **options)
    file = cast(IO[str], _Unpadded(shown.file))
    return Console(width=WHOLE, **{**options, "file": file})


class _Unpadded:
    """A text file that is written without the spaces and the long rules with which tables fill their lines."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(_FILLING.sub("", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Fitting:
    """The first of several renderables that fits into the width of the console, or the last one."""

    def __init__(self, *candidates: RenderableType) -> None:
        self.candidates = candidates

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        free = options.update(max_width=WHOLE)
        for candidate in self.candidates:
            if Measurement.get(console, free, candidate).maximum <= options.max_width:
                break
        yield candidate


def fitting_table(columns: Sequence[str], rows: Sequence[Sequence[str]], dispensable: Sequence[str]) -> Fitting:
    """A table that leaves out columns, in the order of ``dispensable``, until it fits."""
    candidates = []
    for count in range(len(dispensable) + 1):
        left_out = dispensable[:count]
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        shown = [i for i, name in enumerate(columns) if name not in left_out]
        for i in shown:
            table.add_column(columns[i], no_wrap=True)
        for row in rows:
            table.add_row(*(Text(row[i]) for i in shown))
        if left_out:
            table.caption = Text(f"in a wider terminal or a pipe, also: {', '.join(left_out)}", style="dim")
            table.caption_justify = "left"
        candidates.append(table)
    return Fitting(*candidates)
