"""The command line: a command for every experiment, and ``report``."""

from __future__ import annotations

import os
import subprocess
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
from rmsnorm.specification import errors
from rmsnorm.targets.apart import end_by_exception

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
    Console(stderr=True, soft_wrap=True).print(str(error), style="red", highlight=False, markup=False)
    sys.exit(UNUSABLE)


def _command(experiment: Experiment) -> Callable[..., None]:
    """The function of a command, with the options of the experiment as typer reads them: from its signature."""
    own = {row.name: row for row in fields(experiment.options)}

    def command(
        norm: list[str] | None, seeds: list[str], times: int, data: Path | None, out: Path | None, **values: Any
    ) -> None:
        from experiments.results import show, show_times
        from experiments.run import run
        from experiments.timing import times_of

        norms = _parts(norm) or list(experiment.norms)
        options = experiment.options(**values)
        folder = out or Path("runs") / experiment.name
        _limit_threads(options.threads)
        if times:
            show_times(times_of(experiment, options, norms, times, data, folder, _Bar("turns")))
        else:
            show(run(experiment, options, norms, _numbers(seeds), data, folder, _Bar()))
        typer.echo(f"written to {folder}")

    shared = {
        "norm": (list[str] | None, None, f"{', '.join(experiment.norms)}. Repeatable, or separated by commas."),
        "seeds": (list[str], ["1"], "Seeds. Repeatable, or separated by commas. Five decide."),
        "times": (int, 0, "Do not train to the end: measure a step so many times with each norm and all operations."),
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


def _limit_threads(count: int) -> None:
    """Before a framework is imported, which reads these."""
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), str(count))
    flag = f"--xla_cpu_multi_thread_eigen={'true' if count > 1 else 'false'}"  # XLA takes one thread or all
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def _parts(values: list[str] | None) -> list[str]:
    return list(dict.fromkeys(part.strip() for value in values or () for part in value.split(",")))


def _numbers(values: list[str]) -> list[int]:
    parts = _parts(values)
    if not all(part.isdecimal() for part in parts):
        raise errors.out_of_domain("experiments", "seeds", ",".join(parts), "integers >= 0", "write 1,2,3")
    return list(map(int, parts))


class _Bar:
    """Progress with the time that is left: a bar in a terminal, else a line for every evaluation."""

    def __init__(self, unit: str = "steps") -> None:
        self.unit, console = unit, Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit),
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
            print(f"{text}, {task.completed:g} of {task.total:g} {self.unit}{left}", file=sys.stderr, flush=True)


for _name in NAMES:
    app.command(name=_name)(_command(get(_name)))


_RESULTS: Final = Path("experiments/results")
_FOLDER: Any = Annotated[Path, typer.Option(help="Folder with a folder for each run.", file_okay=False)]


@app.command(name="all")
def every(
    names: Annotated[list[str] | None, typer.Argument(help="Some of the runs of our page; by default all.")] = None,
    out: _FOLDER = _RESULTS,
) -> None:
    """Start each run of our page whose results are missing, one after another. Then write the page."""
    from experiments.runs import RUNS, missing

    known = [planned.name for planned in RUNS]
    for name in names or ():
        if name not in known:
            raise errors.not_a_choice("experiments", "the run", name, known)
    out.mkdir(parents=True, exist_ok=True)
    for planned, file in missing(out):
        if planned.name in (names or known):
            typer.echo(f"{planned.name}: {'times' if file == 'times.json' else 'training'}")
            command = [sys.executable, "-m", "experiments", *planned.arguments(file, out)]
            if subprocess.run(command, check=False).returncode:  # a process of its own: of one framework
                raise typer.Exit(UNUSABLE)
    if not missing(out):
        report(out, out.parent / "RESULTS.md")


@app.command()
def report(
    folder: _FOLDER = _RESULTS,
    out: Annotated[Path, typer.Option(help="The page, in Markdown.", dir_okay=False)] = Path("report.md"),
) -> None:
    """The page of all runs: the claim, the answer, tables and figures."""
    from experiments.report import page
    from rmsnorm.files import write_text

    write_text(out, page(folder, out.parent))
    typer.echo(f"written to {out}")
