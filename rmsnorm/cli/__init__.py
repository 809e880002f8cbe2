"""The command line. It imports no framework: each backend runs in its own process."""

from __future__ import annotations

from typing import Annotated

import typer

from rmsnorm import __version__
from rmsnorm.cli import bench, check, identify, port, tables, vectors

app = typer.Typer(
    name="rmsnorm",
    help="RMSNorm for NumPy, PyTorch, Keras/TensorFlow and Flax, compared with one golden reference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


app.command(epilog=check.EPILOG)(check.check)
app.command(epilog=identify.EPILOG)(identify.identify)
app.add_typer(vectors.app)
app.add_typer(port.app)
app.add_typer(bench.app)
app.command()(tables.variants)
app.command()(tables.invariances)
