"""``rmsnorm bench``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rmsnorm import PRESETS, errors, screen
from rmsnorm.cli.reports import Json, check_folders, file
from rmsnorm.cli.usage import BACKEND_NAMES, DEVICES, DIFFERS, UNUSABLE, backends, choices, progress, sizes, unusable

if TYPE_CHECKING:
    from rmsnorm.bench.run import BenchRun

_BACKEND_NAMES: Final = f"{BACKEND_NAMES} (with Keras on TensorFlow), keras-torch, keras-jax"
_SHAPES: Final = ("1x4096", "32x768", "512x768", "8192x1024", "4096x4096")
_measured = partial(typer.Option, rich_help_panel="How it is measured")
EPILOG: Final = (
    "Examples:\n\n"
    "    rmsnorm bench --backend torch --shape 512x768 --dtype float32\n\n"
    "    rmsnorm bench --backend flax --op fwd+bwd --seconds 5 --summary flax.jsonl --plot flax.svg\n\n"
    "    rmsnorm bench --backend torch --device cuda --variant llama --dtype bfloat16\n\n"
    "Exit status: 0 all timed, 1 one of ours is wrong or a backend crashed, hung or was stopped, 2 bad usage or a "
    "requested backend is not installed."
)


# options that the programs in benchmarks/ have, too
Threads = Annotated[int | None, _measured(help="Cores to use.", min=1, show_default="all")]
Seconds = Annotated[
    float,
    _measured(help="Seconds for a cell, for all its candidates together.", min=0.0),
]
Summary = Annotated[
    Path | None,
    file(help="Write one line of JSON for each record, in few digits."),
]


def bench(
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
    seconds: Seconds = 2.0,
    threads: Threads = None,
    json: Json = None,
    summary: Summary = None,
    plot: Annotated[Path | None, file(help="Draw GB/s over size as SVG.")] = None,
) -> None:
    """Time ours beside the framework's own layer, LayerNorm, each eagerly and compiled, and a copy of the same bytes.

    A cell is an op at a shape in a dtype. Its candidates take turns in one process, in random order. Ours is checked
    first, by the bounds of `rmsnorm check`, and is not timed if it is wrong. The copy is the lower limit: forward reads
    x and writes y; backward reads x and dy and writes dx. Read the ratios: absolute times drift with the machine,
    ratios far less. The first columns of ratios say how much faster a candidate is than the built-in layer and than
    LayerNorm, run in the same way, and how much slower than a copy.
    """
    from rmsnorm.bench import report
    from rmsnorm.bench.backends import BACKENDS
    from rmsnorm.bench.problem import DTYPES, OPS
    from rmsnorm.bench.run import worker_command

    command = "rmsnorm bench"
    chosen = backends(backend, command, tuple(BACKENDS))
    ops = choices("op", op, tuple(OPS), command)
    types = choices("dtype", dtype, DTYPES, command) if dtype else ("float32", "bfloat16")
    if variant:
        choices("variant", [variant], tuple(PRESETS), command)
    choices("device", [device], DEVICES, command)
    shapes = [sizes(text, "rmsnorm bench") for text in dict.fromkeys(shape or _SHAPES)]
    check_folders(command, json, summary, plot)
    if plot and find_spec("matplotlib") is None:
        raise unusable(f"{command}: matplotlib is not installed, expected for --plot; {errors.install('plot')}")
    if threads and threads > (os.cpu_count() or threads):
        raise unusable(str(errors.out_of_domain(command, "threads", threads, f"at most {os.cpu_count()}", "use less")))
    commands = {
        name: worker_command(
            name, ops=ops, shapes=shapes, dtypes=types, variant=variant, seconds=seconds, threads=threads,
            device=device if name != "numpy" or backend else "cpu",
        )
        for name in chosen
    }  # fmt: skip
    keep = partial(write, settings={"seconds": seconds, "threads": threads}, json=json, summary=summary)
    runs = run_each(commands, dict.fromkeys(chosen, len(ops) * len(shapes) * len(types)), keep)
    screen.console(least=report.WIDTH).print(report.terminal(runs))
    keep(runs, is_over=True)
    if plot and any(state.records for state in runs):
        from rmsnorm.bench.plot import write_plot

        write_plot(runs, plot)
    end(runs, backend)


def run_each(
    commands: Mapping[str, Sequence[str]], totals: Mapping[str, int], keep: Callable[[list[BenchRun]], None]
) -> list[BenchRun]:
    """Run the worker of each backend, one after the other, with a bar for its cells, until the user stops one.

    ``keep`` is called after every cell with all runs, so that what is finished is kept however this process ends.
    """
    from rmsnorm.bench.run import run

    runs: list[BenchRun] = []

    def follow(state: BenchRun) -> None:
        if state.records:
            keep([*runs, state])
        shown.update(bars[state.name], completed=state.cells)

    with progress("cells", lines=True) as shown:
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
    from rmsnorm.bench.files import write_json, write_summary

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
