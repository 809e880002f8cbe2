"""Ours beside the framework's own layer, LayerNorm and a copy of the same bytes.

python benchmarks/compare.py --backend torch --shape 512x768
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from timing import report
from timing.backends import BACKENDS, open_backend
from timing.cell import measure
from timing.plot import write_plot
from timing.problem import DTYPES, OPS, make
from timing.programs import Seconds, Summary, Threads, end, run_each, write
from timing.run import BenchRun, hello, serve

from rmsnorm import PRESETS
from rmsnorm.cli.reports import Json, file
from rmsnorm.cli.usage import BACKEND_NAMES, DEVICES, backends, choices, sizes, unusable
from rmsnorm.specification import errors

_BACKEND_NAMES: Final = f"{BACKEND_NAMES} (with Keras on TensorFlow), keras-torch, keras-jax"
_SHAPES: Final = ("1x4096", "32x768", "512x768", "8192x1024", "4096x4096")
EPILOG: Final = (
    "Examples:\n\n"
    "    python benchmarks/compare.py --backend torch --shape 512x768 --dtype float32\n\n"
    "    python benchmarks/compare.py --backend torch --shape 512x768 --no-compile    (seconds)\n\n"
    "    python benchmarks/compare.py --backend flax --op fwd+bwd --seconds 5 --summary flax.jsonl --plot flax.svg\n\n"
    "    python benchmarks/compare.py --backend torch --device cuda --variant llama --dtype bfloat16\n\n"
    "Exit status: 0 all timed, 1 one of ours is wrong or a backend crashed, hung or was stopped, 2 bad usage or a "
    "requested backend is not installed."
)
app = typer.Typer(add_completion=False)


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
    seconds: Seconds = 2.0,
    threads: Threads = None,
    no_compile: Annotated[
        bool,
        typer.Option(
            "--no-compile",
            help="Leave out the layers in torch.compile, tf.function and jax.jit, which take long to compile.",
            rich_help_panel="How it is measured",
        ),
    ] = False,
    json: Json = None,
    summary: Summary = None,
    plot: Annotated[Path | None, file(help="Draw GB/s over size as SVG.")] = None,
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
    chosen = backends(backend, command, tuple(BACKENDS))
    ops = choices("op", op, tuple(OPS), command)
    types = choices("dtype", dtype, DTYPES, command) if dtype else ("float32", "bfloat16")
    if variant:
        choices("variant", [variant], tuple(PRESETS), command)
    choices("device", [device], DEVICES, command)
    shapes = [sizes(text, command) for text in dict.fromkeys(shape or _SHAPES)]
    if plot and find_spec("matplotlib") is None:
        raise unusable(f"{command}: matplotlib is not installed, expected for --plot; pip install matplotlib")
    if threads and threads > (os.cpu_count() or threads):
        raise unusable(str(errors.out_of_domain(command, "threads", threads, f"at most {os.cpu_count()}", "use less")))
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
    if plot and any(state.records for state in runs):
        write_plot(runs, plot)
    end(runs, backend)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        serve(work)
    else:
        app()
