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
    out: Annotated[Path | None, typer.Argument(metavar="[OUT]", help="With --to: the file to write.")] = None,
    variant: Annotated[str | None, typer.Option(help="The variant that they must fit, such as gemma.")] = None,
    to: Annotated[
        str | None, typer.Option(help="Write OUT with the gains that this variant has for the same y.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say whether the gains in a checkpoint are w or 1 + w.

    It reads a safetensors or GGUF file (or a folder of them), a NumPy archive, a file of Keras or a checkpoint of
    Orbax, and calls nothing.

    With --to it writes a copy of a safetensors file whose gains are 1 + w in place of w, or w in place of 1 + w, as
    that variant has them. If a gain would lose a bit, nothing is written.
    """
    if to is not None or out is not None:
        _rewrite(file, out, to, variant, json)
        return
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


def _rewrite(file: Path, out: Path | None, to: str | None, variant: str | None, json: bool) -> None:
    from rmsnorm.identify.rewriting import rewrite_gains

    if to is None or out is None:
        missing = "--to VARIANT" if to is None else "the file to write"
        raise typer.BadParameter(f"{missing} is missing: rmsnorm gains FILE OUT --to gemma")
    with Console(stderr=True).status(f"writing {out}"):
        rewritten = rewrite_gains(file, out, to, variant)
    typer.echo(json_.dumps(rewritten.json, indent=2) if json else rewritten.text)
