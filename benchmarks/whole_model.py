"""What a norm costs where users meet it: a training step and a decoded word of a Transformer.

    python benchmarks/whole_model.py --backend torch

A worker (``whole_model.py worker NAME ...``) writes one JSON object a line, as those of compare.py do.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Final

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from timing.backends import BACKENDS, open_backend
from timing.candidates import BUILTIN, LAYER_NORM, OURS, Call
from timing.measure import alternate, used_by_others
from timing.programs import Summary, Threads, end, run_each, write
from timing.report import WIDTH, ms, outcome, times
from timing.run import BenchRun, hello, serve
from whole_models import DTYPES, MODES, NORMS, OPS, Sizes

from rmsnorm.cli.reports import Json
from rmsnorm.cli.usage import backends, choices, unusable
from rmsnorm.specification import dtypes, errors
from rmsnorm.specification.dtypes import unit_roundoff

app = typer.Typer(add_completion=False)
EPILOG: Final = (
    "Examples:\n\n"
    "    python benchmarks/whole_model.py --backend torch --dtype bfloat16\n\n"
    "    python benchmarks/whole_model.py --op decode --mode compiled --mode jit --width 1024 --length 2048\n\n"
    "Exit status: 0 all timed, 1 ours is wrong or a backend crashed, hung or was stopped, 2 bad usage or a requested "
    "backend is not installed."
)

Step = Callable[[str, str, Sizes, str, str], Call]  # of op, norm, sizes, dtype, mode


def allowed(sizes: Sizes, dtype: str) -> float:
    """How far the results of two models with the same norm may be apart, divided by the largest.

    What a block adds is rounded about eight times: by two norms, by the matrices, by attention and by the sums. The
    roundings of two models add up. A model with another norm is hundreds of times as far away in float32.
    """
    return 2 * (8 * sizes.layers + 2) * unit_roundoff(dtype)


def measure(
    step: Step, op: str, sizes: Sizes, dtype: str, mode: str, norms: Sequence[str], seconds: float
) -> list[dict[str, Any]]:
    """One record for each norm. The result of ours is compared with the built-in layer's, if both are asked for."""
    records, calls, results = [], {}, {}
    for norm in norms:
        record: dict[str, Any] = {
            "op": op, "shape": list(sizes), "dtype": dtype, "candidate": f"{norm} {mode}", "ours": norm == OURS,
            "mode": mode, "norm": norm, "status": "timed", "detail": "",
        }  # fmt: skip
        try:
            call = step(op, norm, sizes, dtype, mode)
            call()
            results[norm] = np.asarray(call(), dtype=np.float64)  # after a step of training, with its gradients
            calls[norm] = call
        except Exception as error:  # the report names what a framework raised
            record["status"], record["detail"] = "failed", f"{type(error).__name__}: {error}".splitlines()[0]
        records.append(record)
    if {OURS, BUILTIN} <= results.keys():
        want = results[BUILTIN]
        distance = float(np.max(np.abs(results[OURS] - want)) / np.max(np.abs(want)))
        ours = records[norms.index(OURS)]
        ours["error"] = distance if math.isfinite(distance) else None
        if not distance <= allowed(sizes, dtype):
            ours["status"], ours["detail"] = "wrong", f"{distance:.2g} away from the model with the built-in layer"
            del calls[OURS]
    others = used_by_others()
    timings = alternate(calls, seconds=seconds)
    busy = others()
    for record in records:
        timing = timings.get(record["norm"])
        record["timing"], record["others"] = asdict(timing) if timing else None, None if math.isnan(busy) else busy
        for name, other in (("speedup", BUILTIN), ("layer_norm_speedup", LAYER_NORM)):
            compared = timings.get(other) if record["norm"] != other else None
            record[name] = compared.median / timing.median if timing and compared else None
    return records


def worker_command(
    backend: str,
    sizes: Sizes,
    *,
    ops: Sequence[str],
    dtypes: Sequence[str],
    modes: Sequence[str],
    norms: Sequence[str],
    seconds: float,
    threads: int | None,
) -> list[str]:
    options = {
        "sizes": sizes, "ops": ops, "dtypes": dtypes, "modes": modes, "norms": norms, "seconds": seconds,
        "threads": threads,
    }  # fmt: skip
    return [sys.executable, __file__, "worker", backend, json.dumps(options)]


def step_in(backend: str) -> Step:
    if backend == "torch":
        from whole_models import torch

        return torch.step
    if backend == "flax":
        from whole_models import flax

        return flax.step
    from whole_models import keras

    return keras.step


def work(backend: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        workbench = open_backend(backend, "cpu")
    except ModuleNotFoundError as missing:
        yield {"status": "absent", "message": str(missing)}
        return
    yield hello(workbench)
    sizes, step = Sizes(*options["sizes"]), step_in(backend)
    for dtype in options["dtypes"]:
        for mode in (mode for mode in MODES[backend] if mode in options["modes"]):
            for op in options["ops"]:
                yield {"records": measure(step, op, sizes, dtype, mode, options["norms"], options["seconds"])}
    yield {"status": "done"}


def table_of(runs: Sequence[BenchRun]) -> RenderableType:
    """A table with the time of a training step and of a decoded word, and one line about every backend."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    columns = [name for op in OPS for name in (f"{op} ms", "built-in / it", "LayerNorm / it")]
    for name in ("", "norm", *columns):
        table.add_column(name, justify="right" if " " in name else "left", no_wrap=True)
    for state in runs:
        rows: dict[tuple[str, str, str], dict[str, list[str]]] = {}
        for record in state.records:
            timing, row = record["timing"], rows.setdefault((record["dtype"], record["mode"], record["norm"]), {})
            ratios = [times(record["speedup"]), times(record["layer_norm_speedup"])]
            row[record["op"]] = [ms(timing["median"]), *ratios] if timing else [record["status"], "", ""]
        before = None
        for (dtype, mode, norm), row in rows.items():
            cells = [cell for op in OPS for cell in row.get(op, ["", "", ""])]
            name = f"{BACKENDS[state.name].title} {dtypes.short(dtype)} {mode}"
            table.add_row(name if name != before else "", norm, *cells, style="green" if norm == "ours" else "")
            before = name
        table.add_section()
    return Group(table, *(outcome(state) for state in runs))


@app.command(epilog=EPILOG)
def time_models(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="Backend to time: torch, tf (Keras on TensorFlow), flax, keras-torch, keras-jax. Repeatable.",
            show_default="all",
        ),
    ] = None,
    op: Annotated[
        list[str] | None,
        typer.Option(help="train, a step of training, or decode, one word. Repeatable.", show_default="both"),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="eager, compiled (torch.compile), graph (tf.function) or jit (jax.jit, TensorFlow's XLA). Repeatable.",
            show_default="all that a backend has",
        ),
    ] = None,
    norm: Annotated[
        list[str] | None,
        typer.Option(help="ours, built-in, LayerNorm or none. Repeatable.", show_default="all"),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Dtype of all parameters: float32 or bfloat16. Repeatable.", show_default="both"),
    ] = None,
    layers: Annotated[int, typer.Option(help="Blocks of attention and SwiGLU, each with two norms.", min=1)] = 8,
    width: Annotated[int, typer.Option(help="Features; a head has 64 of them.", min=2)] = 512,
    batch: Annotated[int, typer.Option(help="Sentences of a training step.", min=1)] = 4,
    length: Annotated[int, typer.Option(help="Words of a sentence, and those that a decoded word sees.", min=2)] = 256,
    seconds: Annotated[float, typer.Option(help="Seconds for a cell, for all norms together.", min=0.0)] = 10.0,
    threads: Threads = None,
    json: Json = None,
    summary: Summary = None,
) -> None:
    """Time a small Transformer with our RMSNorm, the framework's own, LayerNorm and no norm.

    It is the number that a user feels: a norm is a few per cent of a model, and a slow one, or one that keeps a
    compiler from fusing what stands around it, costs more. The model is a decoder in the framework's own layers, the
    same in each. train is a step of gradient descent: forward pass, loss, gradients, new parameters. decode is the
    logits of one more word, with the keys and values of the words before it. A cell is an op in a mode and a dtype; its
    norms take turns in one process, in random order. The second result of ours is first compared with the built-in
    layer's. On the CPU.
    """
    command = "whole_model.py"
    chosen = backends(backend, command, tuple(MODES))
    modes = tuple(dict.fromkeys(name for key in chosen for name in MODES[key]))
    options: Any = {
        "ops": choices("op", op, OPS, command), "dtypes": choices("dtype", dtype, DTYPES, command),
        "modes": choices("mode", mode, modes, command), "norms": choices("norm", norm, NORMS, command),
        "seconds": seconds, "threads": threads,
    }  # fmt: skip
    sizes = Sizes(layers, width, batch, length)
    if width % sizes.heads:
        raise unusable(str(errors.out_of_domain(command, "width", width, "whole heads", "use a multiple of 64")))
    cells = len(options["ops"]) * len(options["dtypes"])
    totals = {name: cells * len({*MODES[name]} & {*options["modes"]}) for name in chosen}
    settings = {**sizes._asdict(), "seconds": seconds, "threads": threads}
    keep = partial(write, settings=settings, json=json, summary=summary)
    runs = run_each({name: worker_command(name, sizes, **options) for name in chosen if totals[name]}, totals, keep)
    Console(width=WIDTH).print(table_of(runs))
    keep(runs, is_over=True)
    end(runs, backend)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        serve(work)
    else:
        app()
