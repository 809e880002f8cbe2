"""``rmsnorm gains``."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rmsnorm.cli.usage import DIFFERS, Verbose, unusable

if TYPE_CHECKING:
    from rmsnorm.identify.checkpoint import Checkpoint
    from rmsnorm.identify.gain_pairs import GainPairs

EPILOG: Final = (
    "Examples:\n\n"
    "    rmsnorm gains model.safetensors --variant gemma\n\n"
    "    rmsnorm gains original/ converted.gguf --expect plus-one\n\n"
    "Exit status: 0 they fit, 1 they contradict the variant, each other or --expect, or tell nothing, 2 bad usage or "
    "no such file."
)


def gains(
    file: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint.")],
    other: Annotated[
        Path | None, typer.Argument(metavar="[B]", help="Another form of it, to compare norm by norm.")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="The variant that they must fit, such as gemma.")] = None,
    expect: Annotated[
        str | None, typer.Option(help="What B must be: same, plus-one or minus-one.", show_default="any one of them")
    ] = None,
    verbose: Verbose = False,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say whether the gains in a checkpoint are w or 1 + w, and whether they learned; or how B's are made of A's.

    Of one file: norms that differ from the others, 1 added twice, and gains that stay at exactly 1 in bfloat16. Of two:
    "B = A + 1 in 32 of 33 norms: not model.norm.weight". It reads safetensors files (or a folder of them), GGUF files,
    NumPy archives, files of Keras and checkpoints of Orbax, and calls nothing.
    """
    from rmsnorm.identify.checkpoint import identify_checkpoint
    from rmsnorm.identify.gain_pairs import compare_gains

    if (variant is not None and other is not None) or (expect is not None and other is None):
        got, want = ("--variant", "one file") if other is not None else ("--expect", "two files")
        raise unusable(f"rmsnorm gains: {got} is given for another number of files, expected {want}; drop it")
    found: Checkpoint | GainPairs
    with Console(stderr=True).status(f"reading the gains of {file}"):
        found = identify_checkpoint(file, variant) if other is None else compare_gains(file, other, expect)
    if json:
        typer.echo(json_.dumps(found.json, indent=2))
    else:
        rows = _kinds(found) if other is None else _norms(found) if verbose else []  # type: ignore[arg-type]
        style = {True: "bold green", False: "bold red", None: ""}[found.agrees]
        Console(soft_wrap=True).print(*rows, Text(found.text, style=style))
    if not found.agrees:
        raise typer.Exit(DIFFERS)


def _kinds(checkpoint: Checkpoint) -> list[Table]:
    table = Table("gains", "tensors", "mean", "least", "most", "below 0", "at 1", "they fit", box=SIMPLE_HEAD)
    for kind in checkpoint.kinds:
        numbers = (f"{number:.3g}" for number in (kind.mean, kind.least, kind.most))
        table.add_row(
            Text(kind.name), str(kind.count), *numbers, f"{kind.negative:.0%}", f"{kind.stuck:.0%}", kind.fits
        )
    return [table]


def _norms(pairs: GainPairs) -> list[Table]:
    table = Table("A", "B", "B is", "apart", box=SIMPLE_HEAD)
    for norm in pairs.norms:
        name = norm.b if norm.b != norm.a else "the same name"
        rounded = ", rounded" if norm.rounded else ""
        table.add_row(Text(norm.a), Text(name), f"{norm.relation}{rounded}", f"{norm.difference:.3g}")
    return [table]
