"""The command line. It imports no framework: each backend runs in its own process."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from rmsnorm import __version__, errors
from rmsnorm.cli import bench, check, identify, port, tables, vectors
from rmsnorm.cli.usage import UNUSABLE
from rmsnorm.processes import end_by_exception

app = typer.Typer(
    name="rmsnorm",
    help="RMSNorm for NumPy, PyTorch, Keras/TensorFlow and Flax, compared with one golden reference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The command ``rmsnorm``. However it ends, nothing unfinished is left, and no worker."""
    end_by_exception()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # of head, say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # a full disk, a folder that cannot be written to
        where = error.filename or "standard output"
        print(
            errors.out_of_domain("rmsnorm", where, error.strerror, "space and permission", "name another"),
            file=sys.stderr,
        )
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left cannot be written at the end
        sys.exit(UNUSABLE)


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
