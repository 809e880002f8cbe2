"""Ours beside the framework's own layer, LayerNorm and a copy of the same bytes.

python benchmarks/compare.py --backend torch --shape 512x768
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from timing import report
from timing.backends import BACKENDS, open_backend
from timing.cell import measure
from timing.files import write_json, write_summary
from timing.problem import DTYPES, OPS, make
from timing.run import BenchRun, hello, run, serve

from rmsnorm import PRESETS
from rmsnorm.cli.usage import (
    BACKEND_NAMES,
    DEVICES,
    DIFFERS,
    UNUSABLE,
    Json,
    backends,
    choices,
    file,
    progress,
    sizes,
    unusable,
)
from rmsnorm.specification import errors

_BACKEND_NAMES: Final = f"{BACKEND_NAMES} (with Keras on TensorFlow), keras-torch, keras-jax"
_SHAPES: Final = ("1x4096", "32x768", "512x768", "8192x1024", "4096x4096")
EPILOG: Final = (
    "Examples:\n\n"
    "    python benchmarks/compare.py --backend torch --shape 512x768 --dtype float32\n\n"
    "    python benchmarks/compare.py --backend torch --shape 512x768 --no-compile    (seconds)\n\n"
    "    python benchmarks/compare.py --backend flax --op fwd+bwd --seconds 5 --summary flax.jsonl\n\n"
    "    python benchmarks/compare.py --backend torch --device cuda --variant llama --dtype bfloat16\n\n"
    "Exit status: 0 all timed, 1 one of ours is wrong or a backend crashed, hung or was stopped, 2 bad usage or a "
    "requested backend is not installed."
)
app = typer.Typer(add_completion=False)
_measured = partial(typer.Option, rich_help_panel="How it is measured")


def worker_command(
    backend: str,
    *,
    ops: Sequence[str],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[str],
    variant: str | None = None,
    device: str = "cpu",
    seconds: float = 1.0,
    threads: int | None = None,
    eager_only: bool = False,
) -> list[str]:
    """The command line of a worker."""
    options = {
        "ops": list(ops), "shapes": [list(shape) for shape in shapes], "dtypes": list(dtypes), "variant": variant,
        "device": device, "seconds": seconds, "threads": threads, "eager_only": eager_only,
    }  # fmt: skip
    return [sys.executable, __file__, "worker", backend, json.dumps(options)]


def work(name: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        workbench = open_backend(name, options["device"])
    except ModuleNotFoundError as error:
        yield {"status": "absent", "message": str(error)}
        return
    except errors.InputError as error:
        yield {"status": "refused", "message": str(error)}
        return
    yield hello(workbench)
    variant = PRESETS[options["variant"]] if options["variant"] else BACKENDS[name].variant
    for shape in options["shapes"]:
        for dtype in options["dtypes"]:
            problem = make(shape, dtype)
            for op in options["ops"]:
                records = measure(
                    workbench, problem, op, variant, seconds=options["seconds"], eager_only=options["eager_only"]
                )
                yield {"records": [{**asdict(record), "gb_per_s": record.bandwidth} for record in records]}
    yield {"status": "done"}


def run_each(
    commands: Mapping[str, Sequence[str]], totals: Mapping[str, int], keep: Callable[[list[BenchRun]], None]
) -> list[BenchRun]:
    """Run the worker of each backend, one after the other, with a bar for its cells, until the user stops one.

    ``keep`` is called after every cell with all runs, so that what is finished is kept however this process ends.
    It may print: the bar is taken away meanwhile.
    """
    runs: list[BenchRun] = []

    def follow(state: BenchRun) -> None:
        if state.records:
            if not shown.disable:
                shown.stop()
            keep([*runs, state])
            if not shown.disable:
                shown.start()
        if shown.disable and state.cells > shown.tasks[bars[state.name]].completed:  # a file or a pipe
            print(f"{state.name} {state.cells}/{totals[state.name]}", file=sys.stderr, flush=True)
        shown.update(bars[state.name], completed=state.cells)

    with progress("cells") as shown:
        bars = {name: shown.add_task(name, total=totals[name], start=False) for name in commands}
        for name, bar in bars.items():
            shown.start_task(bar)
            runs.append(run(name, commands[name], asked=totals[name], on_progress=follow))
            if runs[-1].status == "stopped":
                break
    return runs


def write(
    runs: Sequence[BenchRun],
    settings: Mapping[str, Any],
    json: Path | None,
    summary: Path | None,
    is_over: bool = False,
) -> None:
    """Write the files that were asked for; into what is no file, such as a pipe, only when the runs are over."""
    for path, function in ((json, write_json), (summary, write_summary)):
        if path and (is_over or path.is_file() or not path.exists()):
            function(runs, settings, path)


def end(runs: Sequence[BenchRun], requested: Sequence[str] | None) -> None:
    """Exit with status 1 or 2 if a run failed."""
    states = {state.status for state in runs}
    if states & {"crashed", "hung", "stopped"} or any(state.failures for state in runs):
        raise typer.Exit(DIFFERS)
    if "refused" in states or ("absent" in states and requested):
        raise typer.Exit(UNUSABLE)


@app.command(epilog=EPILOG)
def compare(
    backend: Annotated[
        list[str] | None, typer.Option(help=f"Backend to time: {_BACKEND_NAMES}. Repeatable.", show_default="all")
    ] = None,
    op: Annotated[
        list[str] | None, typer.Option(help="fwd or fwd+bwd, with its gradients. Repeatable.", show_default="both")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Shape of x, the last axis normalised. Repeatable.", show_default=", ".join(_SHAPES)),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Dtype of x and the gain: float16, bfloat16 or float32. Repeatable.", show_default="float32, bfloat16"
        ),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(
            help="Variant that ours computes, such as llama.", show_default="the variant of the built-in layer"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help=f"Where: {' or '.join(DEVICES)} (NumPy: cpu).")] = "cpu",
    seconds: Annotated[float, _measured(help="Seconds for a cell, for all its candidates together.", min=0.0)] = 2.0,
    threads: Annotated[int | None, _measured(help="Cores to use.", min=1, show_default="all")] = None,
    no_compile: Annotated[
        bool,
        _measured(
            "--no-compile",
            help="Leave out the layers in torch.compile, tf.function and jax.jit, which take long to compile.",
        ),
    ] = False,
    json: Json = None,
    summary: Annotated[Path | None, file(help="Write one line of JSON for each record, in few digits.")] = None,
) -> None:
    """Time ours beside the framework's own layer, LayerNorm, each eagerly and compiled, and a copy of the same bytes.

    A cell is an op at a shape in a dtype. Its rows are printed as soon as it is measured: a row for each candidate.
    The candidates of a cell take turns in one process, in random order. Ours is checked first, by the bounds of
    `rmsnorm selftest`, and is not timed if it is wrong.

    How to read a row: "built-in / it" 2.00 means that this candidate takes half the time of the built-in layer, run in
    the same way; "LayerNorm / it" says the same of LayerNorm. "it / copy" 3.00 means that it takes three times as long
    as a copy of the same bytes, the lower limit: forward reads x and writes y; backward reads x and dy and writes dx.
    Read these ratios and not the times: times change with the load of the machine, ratios far less.
    """
    command = "compare.py"
    try:
        chosen = backends(backend, command, tuple(BACKENDS))
        ops = choices("op", op, tuple(OPS), command)
        types = choices("dtype", dtype, DTYPES, command) if dtype else ("float32", "bfloat16")
        if variant:
            choices("variant", [variant], tuple(PRESETS), command)
        choices("device", [device], DEVICES, command)
        shapes = [sizes(text, command) for text in dict.fromkeys(shape or _SHAPES)]
        if threads and threads > (os.cpu_count() or threads):
            raise errors.out_of_domain(command, "threads", threads, f"at most {os.cpu_count()}", "use less")
    except errors.InputError as error:
        raise unusable(str(error)) from None
    commands = {
        name: worker_command(
            name, ops=ops, shapes=shapes, dtypes=types, variant=variant, seconds=seconds, threads=threads,
            eager_only=no_compile, device=device if name != "numpy" or backend else "cpu",
        )
        for name in chosen
    }  # fmt: skip
    keep = partial(write, settings={"seconds": seconds, "threads": threads}, json=json, summary=summary)
    printer = report.Printer(Console(soft_wrap=True))

    def show_and_keep(runs: Sequence[BenchRun]) -> None:
        printer(runs)
        keep(runs)

    runs = run_each(commands, dict.fromkeys(chosen, len(ops) * len(shapes) * len(types)), show_and_keep)
    printer.end(runs)
    keep(runs, is_over=True)
    end(runs, backend)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        serve(work)
    else:
        app()
