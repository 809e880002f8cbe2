"""``rmsnorm compare``."""

from __future__ import annotations

import json as json_
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from rmsnorm.cli.asking import asking, lost
from rmsnorm.cli.callables import TARGET_HELP, Device, Framework, Gradients, called
from rmsnorm.cli.usage import DIFFERS, Dtypes, unusable

_COMMAND: Final = "rmsnorm compare"
EPILOG: Final = (
    "Examples:\n\n"
    "    rmsnorm compare training.py:norm serving.py:norm --variant llama\n\n"
    "    rmsnorm compare my_norm.py:norm my_norm.py:norm --compiled b\n\n"
    "    rmsnorm compare my_norm.py:norm my_norm.py:norm --rows b --dtype bfloat16\n\n"
    "    rmsnorm compare torch.nn:RMSNorm my_norm.py:Norm --within --variant torch\n\n"
    "Exit status: 0 all bits are the same (with --within: each is within the variant's intervals), 1 they are not, "
    "or one of the two raised or hung, 2 wrong usage."
)


def compare(
    a: Annotated[str, typer.Argument(help=f"A: {TARGET_HELP}.", show_default=False)],
    b: Annotated[str, typer.Argument(help="B: the same, of this library or another one.", show_default=False)],
    variant: Annotated[
        str | None, typer.Option(help="With whose values they are called.", show_default="what identify says of A")
    ] = None,
    within: Annotated[
        bool, typer.Option("--within", help="It is enough that each is within the intervals of the variant.")
    ] = False,
    dtype: Dtypes = None,
    framework: Framework = None,
    compiled: Annotated[
        str, called(help="Which of the two its library compiles: a, b or ab.", show_default="none")
    ] = "",
    rows: Annotated[
        str, called(help="Which of the two is called with each row alone: a or b.", show_default="none")
    ] = "",
    gradients: Gradients = True,
    device: Device = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Compare two norms bit by bit: training and serving code, eager and compiled, a batch and its rows.

    Both are called in the same circumstances, as by `rmsnorm check`. The report says which share of y and of each
    gradient has the same bits, where they begin to differ, in which fields of a variant, and whether each is right.
    """
    if lost():
        raise unusable(f"{_COMMAND}: one of the two ended the process, or hung; ask rmsnorm check about each")
    from rmsnorm.parity.pair import compare as compare_norms

    with asking(a):
        pair = compare_norms(
            a, b, variant, framework=framework, dtypes=dtype, gradients=gradients, compiled=compiled, rows=rows,  # type: ignore[arg-type]
            device=device,
        )  # fmt: skip
    if json:
        typer.echo(json_.dumps(pair.json, indent=1))
    else:
        Console(soft_wrap=True).print(Text(pair.text, style="" if pair.is_same else "red"))
    if not (pair.both_right if within else pair.is_same):
        raise typer.Exit(DIFFERS)
