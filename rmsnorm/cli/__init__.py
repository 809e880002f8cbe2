"""The command line. It imports no framework: each backend, and each target, has a process of its own."""

from __future__ import annotations

import sys
import traceback
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rmsnorm import __version__
from rmsnorm.cli import check, compare, explain, gains, identify, port, selftest, tables, vectors
from rmsnorm.cli.usage import BROKEN, unusable
from rmsnorm.specification import environment, errors
from rmsnorm.targets.apart import end_by_exception, import_triton_before_tensorflow, told


class _Commands(TyperGroup):
    """All commands end in one way: what a user or a file did wrong is a sentence, a mistake of this package is not."""

    def invoke(self, ctx: Any) -> Any:
        try:
            environment.check()
            return super().invoke(ctx)
        except BrokenPipeError:  # of head, say; typer ends it
            raise
        except (errors.InputError, OSError, MemoryError) as error:
            raise unusable(_sentence(ctx.invoked_subcommand or "", error)) from None
        except Exception as error:
            if type(error).__module__.startswith(("typer.", "click.")):  # how these end a command, or refuse an option
                raise
            traceback.print_exc()
            print(
                "rmsnorm: this is a mistake of rmsnorm, not of its use; please report the lines above", file=sys.stderr
            )
            raise typer.Exit(BROKEN) from None


def _sentence(command: str, error: BaseException) -> str:
    """What a user did wrong, after the command that was typed and not after the function that it called.

    >>> _sentence("check", errors.InputError("check: eps is nan"))
    'rmsnorm check: eps is nan'
    """
    if isinstance(error, MemoryError):
        return f"rmsnorm: there is too little memory ({error or 'no more is left'}); ask for less"
    sentence = errors.of_system("rmsnorm", error) if isinstance(error, OSError) else str(error)
    return sentence if sentence.startswith("rmsnorm") else f"rmsnorm {command}: {sentence.removeprefix(f'{command}: ')}"


app = typer.Typer(
    name="rmsnorm",
    cls=_Commands,
    help="RMSNorm for NumPy, PyTorch, Keras/TensorFlow and Flax, compared with one golden reference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The command ``rmsnorm``. However it ends, nothing unfinished is left, and no process."""
    end_by_exception()
    import_triton_before_tensorflow()
    if isinstance(sys.stdout, TextIOWrapper):  # and is not closed
        sys.stdout.reconfigure(errors="backslashreplace")
    with told():
        app()


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


app.command(epilog=check.EPILOG)(check.check)
app.command(epilog=compare.EPILOG)(compare.compare)
app.command(epilog=selftest.EPILOG)(selftest.selftest)
app.command(epilog=identify.EPILOG)(identify.identify)
app.command(epilog=gains.EPILOG)(gains.gains)
app.add_typer(port.app)
app.command(epilog=explain.EPILOG)(explain.explain)
app.command()(tables.variants)
app.command(epilog=vectors.EPILOG)(vectors.vectors)
