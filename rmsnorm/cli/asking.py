"""How commands do their work in a process of its own: a crash or a hang there is a sentence of the command."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

import typer
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

from rmsnorm.targets import apart


def ended(arguments: Sequence[str], *, seconds: float = apart.LIMIT, printed: bool = False) -> apart.Ended:
    """As ``apart.run``. What the process may have left in the terminal, a spinner or a bar, is taken away."""
    status = "hung"
    try:
        result = apart.run(arguments, seconds=seconds, printed=printed)
        status = result.status
    finally:
        if status:
            cleared = ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), ControlType.SHOW_CURSOR
            Console(stderr=True).control(Control(*cleared))
    return result


def lost(*, seconds: float = apart.LIMIT) -> apart.Ended | None:
    """Run this command in a process of its own, and end as that; or how it ended, where it did not come to its end.

    None in that process, and in Python: the work is to be done here.
    """
    if not apart.is_parent():
        return None
    result = ended(sys.argv[1:], seconds=seconds)
    if not result.status:
        raise typer.Exit(result.code)
    return result


@contextlib.contextmanager
def asking(target: str) -> Iterator[None]:
    """The block in which a target is asked: what it prints goes to standard error."""
    apart.look_in_current_folder(target)
    console = Console(stderr=True, soft_wrap=True)
    if not console.is_terminal:  # which shows no spinner
        console.print(f"asking {target}: this takes seconds, and up to a minute where every shape is compiled")
    with console.status(f"asking {target}"), contextlib.redirect_stdout(sys.stderr):
        yield
