"""What the commands share: devices, exit statuses, files of reports, the check of names, and the progress bar."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rmsnorm.specification import dtypes, errors
from rmsnorm.specification.frameworks import FRAMEWORKS, NAMES
from rmsnorm.specification.variants import get_variant

if TYPE_CHECKING:
    from rmsnorm.parity.comparison import Run

DEVICES: Final = ("cpu", "cuda")
DIFFERS, UNUSABLE, BROKEN = 1, 2, 3  # exit statuses; 3: this package has a mistake
_MOST: Final = 2**48  # elements: more bytes than a process can address
Dtypes = Annotated[
    list[str] | None, typer.Option(help=f"Dtype of x: {', '.join(dtypes.FLOATS)}. Repeatable.", show_default="all")
]
file = partial(typer.Option, dir_okay=False, rich_help_panel="Reports")
Json = Annotated[Path | None, file(help="Write every record as JSON.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print everything.", rich_help_panel="Reports")]
BACKEND_NAMES: Final = ", ".join(NAMES)
_KEYS: Final = {alias: row.key for row in FRAMEWORKS.values() for alias in row.aliases}


def backends(names: Sequence[str] | None, command: str, known: Sequence[str] = tuple(FRAMEWORKS)) -> tuple[str, ...]:
    """The known keys that the user named, or aliases of frameworks; all of them if the user named none.

    >>> backends(["jax", "flax", "pytorch"], "rmsnorm selftest")
    ('flax', 'torch')
    """
    for name in names or ():
        if _KEYS.get(name, name) not in known:
            shown = [other for other in NAMES if _KEYS.get(other, other) in known]
            others = [other for other in known if other not in FRAMEWORKS]
            raise errors.not_a_choice(command, "backend", name, shown + others)
    return tuple(dict.fromkeys(_KEYS.get(name, name) for name in names or known))


def choices(option: str, names: Sequence[str] | None, known: Sequence[str], command: str) -> tuple[str, ...]:
    """The names that the user chose, each once; all known ones if the user chose none.

    Raises:
        ValueError: a name is unknown.
    """
    return tuple(dict.fromkeys(_choice(option, name, known, command) for name in names or known))


def _choice(option: str, name: str, known: Sequence[str], command: str) -> str:
    if option == "variant":
        return get_variant(command, name).name
    if option == "dtype":
        return errors.dtype_named(command, option, name, known)
    if name not in known:
        raise errors.not_a_choice(command, option, name, known)
    return name


def sizes(text: str, command: str) -> list[int]:
    """The shape that the user wrote."""
    shape = [int(part) if part.isdecimal() else 0 for part in text.split("x")]
    if min(shape) == 0:
        raise errors.out_of_domain(command, "shape", text, "sizes > 0", "write it as 4096x4096")
    if math.prod(shape) > _MOST:
        raise errors.out_of_domain(command, "shape", text, "at most 2^48 elements", "write a smaller one")
    return shape


def end_of_check(runs: Sequence[Run], *, requested: bool = True) -> None:
    """Exit with status 1 or 2 if a comparison failed, or was not made; ``requested`` : each had to be there."""
    states = {state.status for state in runs}
    if states & {"differs", "refuses", "crashed", "hung"}:
        raise typer.Exit(DIFFERS)
    if "refused" in states or ("absent" in states and requested):
        raise typer.Exit(UNUSABLE)


def unusable(message: str) -> typer.Exit:
    """Print what is wrong with the usage. The caller raises the result, which ends the command with status 2."""
    Console(stderr=True, soft_wrap=True).print(message, style="red", highlight=False, markup=False)
    return typer.Exit(UNUSABLE)


def progress(unit: str = "cases", *, hidden: bool = False) -> Progress:
    """A bar for every task on standard error, where that is a terminal. Standard output is left alone."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description:>6}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn(),
        console=console, transient=True, redirect_stdout=False, disable=hidden or not console.is_terminal,
    )  # fmt: skip
