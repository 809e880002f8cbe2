"""``rmsnorm gains``."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rmsnorm.cli.usage import DIFFERS

EPILOG: Final = (
    "Examples:\n\n"
    "    rmsnorm gains model.safetensors --variant gemma\n\n"
    "Exit status: 0 they fit, 1 they contradict the variant or tell nothing, 2 bad usage or no such file."
)


def gains(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A checkpoint.")],
    variant: Annotated[str | None, typer.Option(help="The variant that they must fit, such as gemma.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say whether the gains in a checkpoint are w or 1 + w.

    It reads a safetensors file (or a folder of them), a NumPy archive, a file of Keras or a checkpoint of
    Orbax, and calls nothing.
    """
    from rmsnorm.identify import identify_checkpoint

    with Console(stderr=True).status(f"reading the gains of {file}"):
        checkpoint = identify_checkpoint(file, variant)
    if json:
        typer.echo(json_.dumps(checkpoint.json, indent=2))
    else:
        table = Table("gains", "tensors", "mean", "least", "most", "below 0", "they fit", box=SIMPLE_HEAD)
        for kind in checkpoint.kinds:
            numbers = (f"{number:.3g}" for number in (kind.mean, kind.least, kind.most))
            table.add_row(Text(kind.name), str(kind.count), *numbers, f"{kind.negative:.0%}", kind.fits)
        style = {True: "bold green", False: "bold red", None: ""}[checkpoint.agrees]
        Console(soft_wrap=True).print(table, Text(checkpoint.text, style=style))
    if not checkpoint.agrees:
        raise typer.Exit(DIFFERS)
