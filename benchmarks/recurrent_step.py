"""What RMSNorm costs in place of LayerNorm where the paper measured it: in steps of Nematus's GRU.

    python benchmarks/recurrent_step.py --backend torch

A worker (``recurrent_step.py worker NAME ...``) writes one JSON object a line, as those of compare.py do.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from timing.backends import BACKENDS, open_backend
from timing.candidates import Call
from timing.measure import alternate, used_by_others
from timing.programs import Summary, Threads, end, run_each, write
from timing.report import outcome, three_digits, times
from timing.run import BenchRun, hello, serve

from rmsnorm.cli.reports import Json
from rmsnorm.cli.usage import BACKEND_NAMES, backends
from rmsnorm.nematus.cells import CellNorm, nematus_gru_shapes
from rmsnorm.nematus.numpy.recurrent import nematus_gru

app = typer.Typer(add_completion=False)
EPILOG: Final = (
    "Examples:\n\n"
    "    python benchmarks/recurrent_step.py --backend torch --threads 1\n\n"
    "Exit status: 0 all timed, 1 one is wrong or a backend crashed, hung or was stopped, 2 bad usage or a requested "
    "backend is not installed."
)

NORMS: Final[tuple[CellNorm, ...]] = ("layer", "rms", "prms", "none")
OPS: Final = ("fwd", "fwd+bwd")


class Sizes(NamedTuple):
    """Sizes of the sequences, (length, batch, features), and of the states."""

    length: int
    batch: int
    features: int
    state: int


class Task(NamedTuple):
    """A sequence, the parameters of a GRU under Nematus's names, and the gradient of a loss by the states."""

    x: Any
    h0: Any
    dh: Any
    parameters: dict[str, Any]
    norm: CellNorm


def make(sizes: Sizes, norm: CellNorm, dtype: str = "float32") -> Task:
    """Draw a task. Its matrices are scaled so that the states neither grow nor vanish.

    >>> sorted(make(Sizes(5, 2, 3, 4), "rms").parameters)[:2]
    ['gru0/gates_bias', 'gru0/gates_state_norm/scale']
    """
    random = np.random.default_rng(0)
    length, batch, features, state = sizes
    parameters = {}
    for name, shape in nematus_gru_shapes(features, state, ["input"], norm).items():
        drawn = random.normal(size=shape)
        is_gain = name.endswith(("/scale", "/new_std"))
        parameters[name] = drawn / np.sqrt(shape[0]) if len(shape) == 2 else is_gain + drawn / 8
    x, h0 = random.normal(size=(length, batch, features)), np.zeros((batch, state))
    dh = random.normal(size=(length, batch, state))
    x, h0, dh = (array.astype(dtype) for array in (x, h0, dh))
    return Task(x, h0, dh, {name: array.astype(dtype) for name, array in parameters.items()}, norm)


def _numpy(task: Task) -> dict[str, tuple[Call]]:
    """Forward only: NumPy's cells have no gradients."""
    inputs = (task.x, task.h0, task.parameters)

    def forward() -> Any:
        return (nematus_gru(*inputs, norm=task.norm),)

    return {"": (forward,)}


def _torch(task: Task) -> dict[str, tuple[Call, Call]]:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of compilers would run beside the timing
    import torch

    from rmsnorm.nematus.torch.recurrent import nematus_gru

    x, h0, dh = (torch.from_numpy(array) for array in (task.x, task.h0, task.dh))
    parameters = {name: torch.from_numpy(array).requires_grad_() for name, array in task.parameters.items()}
    leaves = [x.clone().requires_grad_(), *parameters.values()]

    def forward() -> Any:
        with torch.no_grad():
            return (nematus_gru(x, h0, parameters, norm=task.norm),)

    def both() -> Any:
        h = nematus_gru(leaves[0], h0, parameters, norm=task.norm)
        return torch.autograd.grad(h, leaves, dh)

    return {"": (forward, both)}


def _tf(task: Task) -> dict[str, tuple[Call, Call]]:
    import tensorflow as tf

    from rmsnorm.nematus.tf.recurrent import nematus_gru

    x, h0, dh = (tf.constant(array) for array in (task.x, task.h0, task.dh))
    parameters = {name: tf.constant(array) for name, array in task.parameters.items()}

    def forward(x: Any, parameters: Any) -> Any:
        return (nematus_gru(x, h0, parameters, norm=task.norm),)

    def both(x: Any, parameters: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((x, parameters))
            h = nematus_gru(x, h0, parameters, norm=task.norm)
        return tape.gradient(h, (x, parameters), dh)

    def call(function: Any, **options: Any) -> Call:
        compiled = tf.function(function, autograph=False, **options)
        return lambda: compiled(x, parameters)

    return {
        "graph": (call(forward), call(both)),
        "jit": (call(forward, jit_compile=True), call(both, jit_compile=True)),
    }


def _flax(task: Task) -> dict[str, tuple[Call, Call]]:
    import jax

    from rmsnorm.nematus.flax.recurrent import nematus_gru

    x, parameters = jax.device_put((task.x, task.parameters))

    def forward(x: Any, parameters: Any) -> Any:
        return nematus_gru(x, task.h0, parameters, norm=task.norm)

    def both(x: Any, parameters: Any) -> Any:
        return jax.vjp(forward, x, parameters)[1](task.dh)

    def call(function: Any) -> Call:
        compiled = jax.jit(function)
        return lambda: jax.block_until_ready(compiled(x, parameters))

    return {"jit": (call(lambda x, parameters: (forward(x, parameters),)), call(both))}


_CANDIDATES: Final[Mapping[str, Callable[[Task], Mapping[str, tuple[Call, ...]]]]] = {
    "numpy": _numpy, "torch": _torch, "tf": _tf, "flax": _flax,
}  # fmt: skip


def allowed(sizes: Sizes, op: str) -> float:
    """How far states may be from the golden's, or slopes from its differences, divided by the largest gradient.

    A sum of n products has an error of n roundings, and the errors of the steps add up; states are at most 1. The
    backward pass goes through the steps once more.
    """
    passes = 1 + OPS.index(op)
    return passes * sizes.length * (sizes.features + sizes.state) * 2.0**-24


def _states(task: Task, x: Any) -> Any:
    return nematus_gru(x, task.h0, task.parameters, norm=task.norm)


def _slope(task: Task) -> tuple[Any, float]:
    """A direction of length 1 for x, and by differences how fast the loss grows along it."""
    direction, step = np.random.default_rng(1).normal(size=task.x.shape), 1e-4
    direction /= np.linalg.norm(direction)
    above, below = ((task.dh * _states(task, task.x + sign * step * direction)).sum() for sign in (1, -1))
    return direction, (above - below) / (2 * step)


def worker_command(backend: str, sizes: Sizes, *, seconds: float, threads: int | None) -> list[str]:
    options = {"sizes": sizes, "seconds": seconds, "threads": threads}
    return [sys.executable, __file__, "worker", backend, json.dumps(options)]


def _work(name: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    sizes, seconds = Sizes(*options["sizes"]), options["seconds"]
    try:
        workbench = open_backend(name, "cpu")
    except ModuleNotFoundError as missing:
        yield {"status": "absent", "message": str(missing)}
        return
    yield hello(workbench)
    calls: dict[tuple[str, str, str], Call] = {}
    records: list[dict[str, Any]] = []
    for norm in NORMS:
        task, wide = make(sizes, norm), make(sizes, norm, "float64")
        states, (direction, slope) = _states(wide, wide.x), _slope(wide)
        for mode, pair in _CANDIDATES[name](task).items():
            for op, call in zip(OPS, pair, strict=False):
                got = np.asarray(workbench.fetch(call()[0]), np.float64)
                errors = got - states if op == "fwd" else (got * direction).sum() - slope
                error = float(abs(errors).max() / max(1.0, abs(got).max()))
                status = "timed" if error <= allowed(sizes, op) else "wrong"
                if status == "timed":
                    calls[mode, op, norm] = call
                records.append({
                    "op": op, "shape": list(sizes), "dtype": "float32", "candidate": f"{norm} {mode}".strip(),
                    "ours": True, "mode": mode, "norm": norm, "status": status, "error": error,
                    "detail": "" if status == "timed" else f"off by {error:.2g} of the largest",
                })  # fmt: skip
        yield {"records": []}
    others = used_by_others()
    timings: dict[Any, Any] = {}
    for cell in dict.fromkeys(key[:2] for key in calls):
        by_norm = alternate({key[2]: call for key, call in calls.items() if key[:2] == cell}, seconds=seconds)
        timings |= {(*cell, norm): timing for norm, timing in by_norm.items()}
    busy = others()
    for record in records:
        mode, op, norm = (record[key] for key in ("mode", "op", "norm"))
        timing, layer = timings.get((mode, op, norm)), timings.get((mode, op, "layer"))
        record["timing"] = asdict(timing) if timing else None
        record["speedup"] = layer.median / timing.median if timing and layer else None
        record["others"] = busy
    yield {"records": records}
    yield {"status": "done"}


def table_of(runs: Sequence[BenchRun], length: int) -> RenderableType:
    """A table with the time of a step in microseconds, and one line about every backend."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("", "norm", "fwd us", "LayerNorm / it", "fwd+bwd us", "LayerNorm / it"):
        table.add_column(name, justify="right" if " " in name else "left", no_wrap=True)
    for state in runs:
        rows: dict[tuple[str, str], list[str]] = {}
        for record in state.records:
            timing, cells = record["timing"], rows.setdefault((record["mode"], record["norm"]), [])
            cells += (
                [three_digits(1e6 * timing["median"] / length), times(record["speedup"])]
                if timing
                else [record["status"], ""]
            )
        for (mode, norm), cells in sorted(rows.items(), key=lambda row: row[0][0]):
            name = f"{BACKENDS[state.name].title} {mode}".strip()
            table.add_row(name if norm == "layer" else "", norm, *cells, style="green" if norm == "rms" else "")
        table.add_section()
    return Group(table, *(outcome(state) for state in runs))


@app.command(epilog=EPILOG)
def time_steps(
    backend: Annotated[
        list[str] | None, typer.Option(help=f"Backend to time: {BACKEND_NAMES}. Repeatable.", show_default="all")
    ] = None,
    length: Annotated[int, typer.Option(help="Steps of the sequence.", min=1)] = 20,
    batch: Annotated[int, typer.Option(help="Sentences.", min=1)] = 32,
    features: Annotated[int, typer.Option(help="Features of a word.", min=1)] = 512,
    state: Annotated[int, typer.Option(help="Size of the state of the GRU.", min=1)] = 1024,
    seconds: Annotated[
        float, typer.Option(help="Seconds for an op of a backend, for all norms together.", min=0.0)
    ] = 5.0,
    threads: Threads = None,
    json: Json = None,
    summary: Summary = None,
) -> None:
    """Time a step of Nematus's GRU with RMSNorm, with pRMSNorm and without a norm, beside one with LayerNorm.

    fwd is the forward pass; fwd+bwd adds all gradients, as in training. The norms take turns in one process, in random
    order, on the same words; a result is first compared with the golden. Float32 on the CPU. LayerNorm is the fastest
    one of each framework.
    """
    chosen = backends(backend, "recurrent_step.py")
    sizes = Sizes(length, batch, features, state)
    commands = {name: worker_command(name, sizes, seconds=seconds, threads=threads) for name in chosen}
    settings = {**sizes._asdict(), "seconds": seconds, "threads": threads}
    keep = partial(write, settings=settings, json=json, summary=summary)
    runs = run_each(commands, dict.fromkeys(chosen, len(NORMS) + 1), keep)  # each norm is compared, then all are timed
    Console().print(table_of(runs, length))
    keep(runs, is_over=True)
    end(runs, backend)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        serve(_work)
    else:
        app()
