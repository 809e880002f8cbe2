"""``rmsnorm identify``."""

from __future__ import annotations

import json as json_
import sys
from collections.abc import Mapping
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rmsnorm.cli.asking import asking, lost
from rmsnorm.cli.callables import (
    TARGET_HELP,
    Call,
    Compiled,
    Device,
    Framework,
    Gradients,
    GroupSize,
    Init,
    called,
    opening,
)  # fmt: skip
from rmsnorm.cli.tables import wrapped
from rmsnorm.cli.usage import DIFFERS, Verbose, unusable
from rmsnorm.specification import errors

if TYPE_CHECKING:
    from rmsnorm.identify import Identity

_COMMAND: Final = "rmsnorm identify"
_MORE: Final = 300.0  # seconds beside those for a norm: for imports, or for the norms of a whole model
EPILOG: Final = (
    "Examples:\n\n"
    "    rmsnorm identify torch.nn:RMSNorm\n\n"
    "    rmsnorm identify transformers.models.llama.modeling_llama:LlamaRMSNorm --json\n\n"
    "    rmsnorm identify my_kernels.py:rms_norm --framework torch --init eps=1e-5\n\n"
    "    rmsnorm identify model.onnx\n\n"
    "    rmsnorm identify my_model.py:make_model --init layers=2\n\n"
    "    rmsnorm identify --model folder_of_a_checkpoint\n\n"
    "Exit status: 0 an RMSNorm over the axes of --axis (the last ones) that is recognised and has no defect, 1 another "
    "norm or axis, a defect, or a target that raised or hung, 2 bad usage or no such target. Of a whole model: "
    "0 it has an RMSNorm that is recognised, 1 none."
)


def identify(
    target: Annotated[str | None, typer.Argument(metavar="TARGET", help=f"{TARGET_HELP}.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="In place of TARGET: a folder with a config.json, which alone says its norms."
        ),
    ] = None,
    init: Init = None,
    framework: Framework = None,
    axis: Annotated[
        str | None, typer.Option(help="Axes that it must normalise, such as 1 or -2,-1.", show_default="the last")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    width: Annotated[
        int | None, called(help="Size of the normalised axis.", min=1, show_default="64, or its only size")
    ] = None,
    shape: Annotated[str | None, called(help="Shape of x, such as 4x64x8x8.", show_default="tries some")] = None,
    call: Call = None,
    group_size: GroupSize = None,
    compiled: Compiled = False,
    gradients: Gradients = True,
    device: Device = "cpu",
    time_limit: Annotated[float, called(help="Seconds for a norm; its process has five minutes more.", min=1.0)] = 60.0,
    verbose: Verbose = False,
) -> None:
    """Find out which normalisation a callable computes: its variant, eps, roundings, gradients, with the evidence.

    The target is called and never read. One changed element shows the axes, rows of ever smaller norm show eps and its
    place, and 16-bit rows show where it rounds. What fits, a variant or one with a known mistake, must then predict y
    of new rows within the intervals of `rmsnorm check`. The target runs in a process of its own. A class is built with
    the arguments that the names in its constructor suggest (`dim`, `hidden_size`, ...).

    A model of PyTorch, Keras or Flax nnx, or a function or class that makes one, is a target, too: each norm in it is
    identified, as rmsnorm.conversion.replace(model, dry_run=True) does. A line has the norms of all blocks together.

    With --model no code is called: the answer is that of a table, with eps from the file.
    """
    if (target is None) == (model is None):
        got = "neither TARGET nor --model" if model is None else "both TARGET and --model"
        raise unusable(f"{_COMMAND}: got {got}, expected one of them; name a callable, such as my_norm.py:f")
    if model is not None:
        _of_config(model, json)
        return
    assert target is not None  # noqa: S101  (one of them is given)
    wanted = None if axis is None else _numbers("axis", axis, ",", "integers such as -2,-1")
    options: dict[str, Any] = {
        **opening(_COMMAND, init, framework, device), "axis": wanted or [-1],
        "shape": None if shape is None else _numbers("shape", shape, "x", "sizes such as 4x64"),
    }  # fmt: skip
    of_norm = {
        "framework": framework, "axis": axis, "shape": shape, "call": call, "group-size": group_size, "width": width,
        "compiled": compiled, "no-gradients": not gradients, "device": device != "cpu",
    }  # fmt: skip
    from rmsnorm.conversion import replace
    from rmsnorm.conversion.places import together
    from rmsnorm.identify import Identity, NoTarget, open_target
    from rmsnorm.identify.search import identify_opened

    if end := lost(seconds=time_limit + _MORE):
        identity = Identity(target, "", defects=(end.message,))
    else:
        with asking(target):
            try:
                opened = open_target(target, width=width, call=call, **options)
                one = opened.compiled if compiled else opened
                identity, of_model = identify_opened(one, width=width, gradients=gradients, time_limit=time_limit), None
            except NoTarget as error:
                if error.model is None:
                    raise
                of_model = {"model": type(error.model).__name__, "norms": together(replace(error.model, dry_run=True))}
        if of_model:
            _of_model(target, of_model, json, [f"--{name}" for name, value in of_norm.items() if value])
            return
    if json:
        typer.echo(json_.dumps(identity.json, indent=2))
    else:
        _show(identity, verbose=verbose)
    grouped = group_size is None or identity["group_size"] == group_size
    if not (identity.recognised and identity.is_over(wanted) and grouped):
        raise typer.Exit(DIFFERS)


def _of_model(target: str, answer: Mapping[str, Any], json: bool, of_norm: list[str]) -> None:
    """A line for the norms of a place in a whole model, or all of them as JSON. Options for one norm are refused."""
    if of_norm:
        raise unusable(
            f"{_COMMAND}: {' and '.join(of_norm)} is given for {target}, a whole model ({answer['model']}), expected "
            "one norm; leave it out, or name the class of the norm"
        )
    norms = answer["norms"]
    if json:
        typer.echo(json_.dumps({"target": target, **answer}, indent=2))
    else:
        typer.echo(errors.printable(f"{target} is a whole model ({answer['model']}), whose norms are"))
        for norm in norms:
            kind = norm["class"] + (f", {norm['count']} of them" if norm["count"] > 1 else "")
            what = "" if norm["variant"] is None else f"RMSNorm, variant {norm['variant']}, eps {norm['eps']}; "
            place = norm["place"] or "the model"
            typer.echo(wrapped(errors.printable(f"{place} ({kind}): {what}{norm['why']}"), "- ", 2))
    if all(norm["variant"] is None for norm in norms):
        raise typer.Exit(DIFFERS)


def _of_config(folder: str, json: bool) -> None:
    """The norms that a config.json says, in a sentence for each, or as JSON."""
    from rmsnorm.identify.config import identify_config

    norms, unknown = identify_config(folder)
    if json:
        typer.echo(json_.dumps({"norms": [norm.json for norm in norms], "unknown": unknown}, indent=2))
        return
    for part, kind, named_by in dict.fromkeys((norm.part, norm.model_type, norm.named_by) for norm in norms):
        kind += " (by architectures)" * (named_by == "architectures")
        typer.echo(wrapped(f"{errors.printable(part) or 'the model'}: {kind}, whose norms in transformers are"))
        for norm in norms:
            if norm.part == part:
                typer.echo(wrapped(str(norm), "- ", 2))
    for part, kind in unknown.items():
        kind = errors.printable(errors.shown(kind))
        typer.echo(wrapped(f"{errors.printable(part)}: {kind} is no family with RMSNorm that is known"))


def _numbers(name: str, text: str, separator: str, want: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(separator)]
    except ValueError:
        numbers = []
    if not numbers or (name != "axis" and min(numbers) < 1):
        raise errors.out_of_domain(_COMMAND, name, text, want, "write it so")
    return numbers


def _show(identity: Identity, *, verbose: bool) -> None:
    """The headline, the defects and how to mend them; then the findings that matter most, or all of them."""
    console = Console(soft_wrap=True)
    console.print(Text(identity.headline, style="bold green" if identity.recognised else "bold red"))
    for sentence in identity.other_defects:
        console.print(Text(f"defect: {sentence}", style="red"))
    if identity.named and (mends := identity.mends(identity.named)):
        console.print(Text(fill(f"to make it {identity.named.name}: {'; '.join(mends)}", 80, subsequent_indent="  ")))
    rows = identity.rows if verbose else identity.brief
    widths = [
        max((len(text) for text in texts), default=0) for texts in ([r.name for r in rows], [r.word for r in rows])
    ]
    room = sys.maxsize if verbose else max(20, 72 - sum(widths))
    table = Table("finding", "value", "evidence", box=SIMPLE_HEAD, show_edge=False)
    for row in rows:
        value = Text(row.word, style="" if row.is_observable else "dim")
        table.add_row(Text(row.name), value, Text(shorten(row.evidence, room, placeholder=" ..."), style="dim"))
    if rows:
        console.print(table)
    more = "" if verbose else f"; -v prints all {len(identity.rows)} findings"
    console.print(Text(f"{identity.framework}, {identity.seconds:.1f} s{more}".removeprefix(", "), style="dim"))
