"""The command line: a command for every experiment, and ``report``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments.experiment import NAMES, Experiment, get
from rmsnorm import errors, screen
from rmsnorm.processes import end_by_exception

UNUSABLE: Final = 2  # exit status

app = typer.Typer(
    name="experiments",
    help="The paper's experiments. Several norms train side by side, step by step in turns.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Errors of data and options are one sentence. After any end, the same command continues."""
    end_by_exception()
    try:
        app()
    except OSError as error:  # a full disk, a folder that cannot be written to, no such file
        where = error.filename or "a file"
        text = errors.out_of_domain("experiments", where, error.strerror, "space and permission", "then run this again")
        _stop(error if error.errno is None else text)
    except (ModuleNotFoundError, ValueError) as error:
        _stop(error)


def _stop(error: object) -> None:
    screen.console(stderr=True).print(str(error), style="red", highlight=False, markup=False)
    sys.exit(UNUSABLE)


def _command(experiment: Experiment) -> Callable[..., None]:
    """The function of a command, with the options of the experiment as typer reads them: from its signature."""
    own = {row.name: row for row in fields(experiment.options)}

    def command(norm: list[str] | None, seeds: list[str], data: Path | None, out: Path | None, **values: Any) -> None:
        from experiments.results import show
        from experiments.run import run

        norms = _parts(norm) or list(experiment.norms)
        options = experiment.options(**values)
        folder = out or Path("runs") / experiment.name
        show(run(experiment, options, norms, _numbers(seeds), data, folder, _Bar()))
        typer.echo(f"written to {folder}")

    shared = {
        "norm": (list[str] | None, None, f"{', '.join(experiment.norms)}. Repeatable, or separated by commas."),
        "seeds": (list[str], ["1"], "Seeds. Repeatable, or separated by commas."),
        "data": (Path | None, None, "Folder with the real data; without it the default data."),
        "out": (Path | None, None, f"Folder of the results, where a run continues. By default runs/{experiment.name}."),
    }  # fmt: skip
    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, typer.Option(help=text)])
        for name, (kind, default, text) in shared.items()
    ]
    for name, row in own.items():
        choices = row.metadata["choices"]
        text = row.metadata["help"] + (f" {', '.join(choices)}." if choices else "")
        kind: Any = type(row.default)
        annotation = Annotated[kind, typer.Option(help=text)]
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=row.default, annotation=annotation))
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = f"{experiment.title}."
    return command


def _parts(values: list[str] | None) -> list[str]:
    return list(dict.fromkeys(part.strip() for value in values or () for part in value.split(",")))


def _numbers(values: list[str]) -> list[int]:
    parts = _parts(values)
    if not all(part.isdecimal() for part in parts):
        raise errors.out_of_domain("experiments", "seeds", ",".join(parts), "integers >= 0", "write 1,2,3")
    return list(map(int, parts))


class _Bar:
    """Progress with the time that is left: a bar in a terminal, else a line for every evaluation."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip

    def __enter__(self) -> _Bar:
        self.bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.__exit__(*error)

    def begin(self, total: int, done: int) -> None:
        self.task = self.bar.add_task("", total=total, completed=done)

    def advance(self) -> None:
        self.bar.advance(self.task)

    def evaluated(self, text: str) -> None:
        self.bar.update(self.task, description=text)
        if self.bar.disable:
            task = self.bar.tasks[self.task]
            left = "" if task.time_remaining is None else f", {task.time_remaining:.0f} s left"
            print(f"{text}, {task.completed:g} of {task.total:g} steps{left}", file=sys.stderr, flush=True)


for _name in NAMES:
    app.command(name=_name)(_command(get(_name)))


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders that experiments wrote.")],
    out: Annotated[Path, typer.Option(help="The page, in Markdown.", dir_okay=False)] = Path("report.md"),
) -> None:
    """One page of several runs: tables with the paper's numbers beside ours, and the figures."""
    from experiments.report import page
    from rmsnorm.files import write_text

    write_text(out, page(folders, out.parent))
    typer.echo(f"written to {out}")
