"""``rmsnorm identify``."""

from __future__ import annotations

import json as json_
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rmsnorm import errors, screen
from rmsnorm.cli.callables import TARGET_HELP, Compiled, Device, Framework, Gradients, GroupSize, Init, called, opening
from rmsnorm.cli.usage import DIFFERS, unusable

if TYPE_CHECKING:
    from rmsnorm.identify import Identity

_COMMAND: Final = "rmsnorm identify"
_SIZES: Final = "sizes such as 4x64"
_of_gains = partial(typer.Option, rich_help_panel="A checkpoint in place of a target")
EPILOG: Final = (
    "Examples:\n\n"
    "    rmsnorm identify torch.nn:RMSNorm\n\n"
    "    rmsnorm identify transformers.models.llama.modeling_llama:LlamaRMSNorm --json\n\n"
    "    rmsnorm identify my_kernels.py:rms_norm --framework torch --init eps=1e-5\n\n"
    "    rmsnorm identify model.onnx\n\n"
    "    rmsnorm identify --checkpoint model.safetensors --variant gemma\n\n"
    "Exit status: 0 an RMSNorm over the axes of --axis (the last ones) that is recognised and has no defect, 1 another "
    "norm or axis, a defect, or a target that raised or hung, gains that contradict --variant or tell nothing, 2 bad "
    "usage or no such target."
)


def identify(
    target: Annotated[
        str | None,
        typer.Argument(help=f"{TARGET_HELP}."),
    ] = None,
    init: Init = None,
    framework: Framework = None,
    axis: Annotated[
        str | None, typer.Option(help="Axes that it must normalise, such as 1 or -2,-1.", show_default="the last")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    width: Annotated[
        int | None,
        called(help="Size of the normalised axis.", min=1, show_default="64, or its only size"),
    ] = None,
    shape: Annotated[
        str | None,
        called(help="Shape of x, such as 4x64x8x8.", show_default="tries some"),
    ] = None,
    arg: Annotated[
        list[str] | None,
        called(help="Another argument of its call, such as condition=4x64, or scale=1:2 for a value beside 0."),
    ] = None,
    group_size: GroupSize = None,
    compiled: Compiled = False,
    gradients: Gradients = True,
    device: Device = "cpu",
    time_limit: Annotated[float, called(help="Seconds for a target, without imports.", min=1.0)] = 60.0,
    checkpoint: Annotated[
        Path | None,
        _of_gains(help="Say whether the gains in a checkpoint are w or 1 + w."),
    ] = None,
    variant: Annotated[
        str | None,
        _of_gains(help="The variant that the gains of --checkpoint are compared with."),
    ] = None,
) -> None:
    """Find out which normalisation a callable computes: its variant, eps, roundings, gradients, with the evidence.

    The target is a black box. Its answers to chosen rows decide between hypotheses: rows of ever smaller norm show eps
    and its place, bfloat16 rows the rounding points, one changed element the axes. The solved variant must then
    predict y on fresh data within the bounds of `rmsnorm check`. The target runs in a process of its own. A class is
    built with the arguments that the names in its constructor suggest (`dim`, `hidden_size`, ...).

    `--checkpoint` calls nothing: it reads the gains of a safetensors file (or a folder of them), a NumPy archive, a
    file of Keras or a checkpoint of Orbax.
    """
    if (target is None) == (checkpoint is None):
        raise unusable(f"{_COMMAND}: expected a TARGET such as torch.nn:RMSNorm, or --checkpoint FILE")
    if checkpoint is not None:
        _of_checkpoint(checkpoint, variant, json)
        return
    if variant is not None:
        raise unusable(f"{_COMMAND}: --variant is for --checkpoint; `rmsnorm check` compares a target with a variant")
    options = opening(_COMMAND, init, framework, device, gradients, compiled)
    wanted = None if axis is None else _numbers("axis", axis, ",", "integers such as -2,-1")
    asked: dict[str, Any] = {
        "shape": None if shape is None else _numbers("shape", shape, "x", _SIZES),
        "axis": [-1] if wanted is None else wanted,
        "args": dict(map(_argument, arg or [])),
    }
    from rmsnorm.identify.worker import identities

    assert target is not None  # noqa: S101  (checked above)
    with Console(stderr=True).status(f"asking {target}"):
        identity = next(identities([target], time_limit=time_limit, width=width, **asked, **options))[1]
    if isinstance(identity, str):
        raise errors.InputValueError(identity)
    if json:
        typer.echo(json_.dumps(identity.json, indent=2))
    else:
        _show(identity)
    grouped = group_size is None or identity["group_size"] == group_size
    if not (identity.recognised and identity.is_over(wanted) and grouped):
        raise typer.Exit(DIFFERS)


def _of_checkpoint(path: Path, variant: str | None, json: bool) -> None:
    from rmsnorm.identify import identify_checkpoint

    with Console(stderr=True).status(f"reading the gains of {path}"):
        found = identify_checkpoint(path, variant)
    if json:
        typer.echo(json_.dumps(found.json, indent=2))
    else:
        table = Table("gains", "tensors", "mean", "least", "most", "below 0", "they fit", box=SIMPLE_HEAD)
        for kind in found.kinds:
            numbers = (f"{number:.3g}" for number in (kind.mean, kind.least, kind.most))
            table.add_row(Text(kind.name), str(kind.count), *numbers, f"{kind.negative:.0%}", kind.fits)
        console = screen.console()
        console.print(table)
        style = {True: "bold green", False: "bold red", None: ""}[found.agrees]
        console.print(Text(found.text, style=style))
    if not found.agrees:
        raise typer.Exit(DIFFERS)


def _numbers(name: str, text: str, separator: str, want: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(separator)]
    except ValueError:
        numbers = []
    if not numbers or (name != "axis" and min(numbers) < 1):
        raise unusable(str(errors.out_of_domain(_COMMAND, name, text, want, "write it so")))
    return numbers


def _argument(text: str) -> tuple[str, tuple[list[int], float]]:
    """The name, the shape and the value of NAME=SHAPE or NAME=SHAPE:VALUE."""
    name, _, rest = text.partition("=")
    sizes, _, value = rest.partition(":")
    try:
        return name, (_numbers("arg", sizes, "x", _SIZES), float(value or 0))
    except ValueError:
        raise unusable(str(errors.out_of_domain(_COMMAND, "arg", text, "NAME=SHAPE:VALUE", "see --help"))) from None


def _show(identity: Identity) -> None:
    console = screen.console()
    console.print(Text(identity.headline, style="bold green" if identity.recognised else "bold red"))
    table = Table("finding", "value", "evidence", box=SIMPLE_HEAD, show_edge=False)
    for row in identity.rows:
        value = Text(row.word, style="" if row.is_observable else "dim")
        table.add_row(Text(row.name), value, Text(row.evidence, style="dim"))
    console.print(table)
    for sentence in identity.defects:
        console.print(Text(f"defect: {sentence}", style="red"))
    console.print(Text(f"{identity.framework}, {identity.seconds:.1f} s".removeprefix(", "), style="dim"))
