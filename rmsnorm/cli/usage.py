"""What the commands share: names, exit statuses, the refusal of bad usage, the progress bar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rmsnorm import errors

BACKENDS: Final = ("numpy", "torch", "tf", "flax")
DEVICES: Final = ("cpu", "cuda")
HELD, DIFFERS, UNUSABLE = 0, 1, 2


def choices(
    name: str, given: Sequence[str] | None, known: Sequence[str], command: str = "rmsnorm check"
) -> tuple[str, ...]:
    for entry in given or ():
        if entry not in known:
            raise unusable(str(errors.not_a_choice(command, name, entry, known)))
    return tuple(dict.fromkeys(given or known))


def unusable(message: str) -> typer.Exit:
    Console(stderr=True).print(message, style="red", highlight=False, markup=False)
    return typer.Exit(UNUSABLE)


def progress(unit: str = "cases") -> Progress:
    return Progress(
        TextColumn("{task.description:>6}"), BarColumn(), TextColumn(f"{{task.completed}}/{{task.total}} {unit}"),
        TimeElapsedColumn(), console=Console(stderr=True), transient=True,
    )  # fmt: skip
