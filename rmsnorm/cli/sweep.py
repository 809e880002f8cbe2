"""``rmsnorm sweep``."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rmsnorm import errors, screen
from rmsnorm.cli.reports import check_folders
from rmsnorm.cli.usage import DEVICES, DIFFERS, choices, progress
from rmsnorm.files import write_text

_COMMAND: Final = "rmsnorm sweep"
EPILOG: Final = (
    "Examples:\n\n"
    "    rmsnorm sweep transformers --markdown norms.md\n\n"
    "Exit status: 0 at least one RMSNorm was found, 1 none, 2 bad usage or no such package."
)


def sweep(
    package: Annotated[str, typer.Argument(help="The package, which must be installed, such as transformers.")],
    device: Annotated[str, typer.Option(help=f"Where they run: {' or '.join(DEVICES)}.")] = "cpu",
    gradients: Annotated[bool, typer.Option(help="Ask for their gradients, too.")] = True,
    time_limit: Annotated[float, typer.Option(help="Seconds for a class, without imports.", min=1.0)] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    markdown: Annotated[Path | None, typer.Option(help="Write the counts as Markdown.", dir_okay=False)] = None,
) -> None:
    """Identify every RMSNorm of a package, and count them by what they compute.

    Each class is made with small sizes and identified as by `rmsnorm identify`, in a process of its own.
    """
    from rmsnorm.identify.sweep import sweep as identify_all

    choices("device", [device], DEVICES, _COMMAND)
    check_folders(_COMMAND, markdown)
    with progress("classes") as bar:
        task = bar.add_task(package[:6], total=None)
        result = identify_all(
            package,
            time_limit=time_limit,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
            device=device,
            gradients=gradients,
        )
    if json:
        typer.echo(json_.dumps(result.json, indent=2))
    else:
        table = Table("classes", "what they compute", "examples", box=SIMPLE_HEAD)
        for text, names in result.clusters:
            table.add_row(str(len(names)), Text(text), Text(", ".join(name.split(":")[1] for name in names[:3])))
        console = screen.console()
        count = sum(len(names) for _, names in result.clusters)
        console.print(f"{count} {'class' if count == 1 else 'classes'} of {package} {result.version}", table)
        for name, reason in result.refused:
            console.print(Text(f"not called: {name}: {reason}", style="dim"))
    if markdown is not None:
        write_text(markdown, result.markdown({name: _why_left(name) for name in result.classes}))
    if not result.clusters:
        raise typer.Exit(DIFFERS)


def _why_left(name: str) -> str | None:
    """Why replace leaves a layer of that class; None where it does not."""
    from rmsnorm.conversion import replace
    from rmsnorm.targets.open import make_layer

    try:
        report = replace(make_layer(name), dry_run=True)
    except errors.InputError as error:
        return str(error)
    own = next((entry for entry in report if not entry.name), None)
    return "it is not asked" if own is None else own.why if own.variant is None else None
