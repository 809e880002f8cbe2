"""``rmsnorm selftest``."""

from __future__ import annotations

import contextlib
import json as json_
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from rmsnorm import PRESETS
from rmsnorm.cli.asking import ended
from rmsnorm.cli.usage import BACKEND_NAMES, DEVICES, Dtypes, Json, backends, choices, end_of_check, progress
from rmsnorm.specification import dtypes
from rmsnorm.targets import apart

if TYPE_CHECKING:
    from rmsnorm.parity.comparison import Run

_COMMAND: Final = "rmsnorm selftest"
EPILOG: Final = (
    "Examples:\n\n"
    "    rmsnorm selftest\n\n"
    "    rmsnorm selftest --backend torch --variant llama --dtype bfloat16\n\n"
    "    rmsnorm selftest --backend flax --device cuda --json parity.json\n\n"
    "Exit status: 0 everything agrees, 1 a backend differs, crashed or hung, 2 wrong usage, "
    "a requested backend is not installed, or no comparison was made."
)


def selftest(
    backend: Annotated[
        list[str] | None, typer.Option(help=f"Backend to compare: {BACKEND_NAMES}. Repeatable.", show_default="all")
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="Variant to compare, such as llama. Repeatable.", show_default="all")
    ] = None,
    dtype: Dtypes = None,
    device: Annotated[str, typer.Option(help=f"Device: {' or '.join(DEVICES)} (NumPy always runs on cpu).")] = "cpu",
    json: Json = None,
) -> None:
    """Compare every backend of this package with the golden: values, gradients and derivatives.

    Every variant is compared in every dtype, and a call of each option in one variant and dtype; with --variant or
    --dtype, in all of these. `rmsnorm check TARGET` compares your own function or layer, and says what the golden and
    the parity ratio are. The NumPy backend checks the golden itself, against the equations in float64.
    """
    from rmsnorm.parity import report

    chosen = backends(backend, _COMMAND)
    variants = choices("variant", variant, tuple(PRESETS), _COMMAND) if variant else ()
    types = choices("dtype", dtype, dtypes.FLOATS, _COMMAND) if dtype else ()
    choices("device", [device], DEVICES, _COMMAND)
    run = _run_apart if apart.is_parent() else _run
    devices = {name: device if name != "numpy" or backend else "cpu" for name in chosen}
    runs = [run(name, own, variants, types) for name, own in devices.items()]
    if apart.is_child():
        typer.echo(json_.dumps([asdict(run) for run in runs]))
        return
    Console(soft_wrap=True).print(report.terminal(runs))
    if json:
        report.write_json(runs, json)
    end_of_check(runs, requested=bool(backend))


def _run_apart(name: str, device: str, variants: Sequence[str], types: Sequence[str]) -> Run:
    """The run of a backend in a process of its own."""
    from rmsnorm.parity.comparison import Comparison, Run

    chosen = [*(f"--variant={variant}" for variant in variants), *(f"--dtype={dtype}" for dtype in types)]
    end = ended(["selftest", "--backend", name, "--device", device, *chosen], printed=True)
    if end.status:
        return Run(name, end.status, end.message)
    if not end.printed:  # what was wrong is on standard error
        return Run(name, "crashed", f"its process ended with exit status {end.code}")
    (fields,) = json_.loads(end.printed)
    return Run(**{**fields, "records": [Comparison(**record) for record in fields["records"]]})


def _run(name: str, device: str, variants: Sequence[str], types: Sequence[str]) -> Run:
    """The run of a backend in this process."""
    from rmsnorm.parity.selftest import compare

    with progress() as bars, contextlib.redirect_stdout(sys.stderr):
        task = bars.add_task(name, total=None)
        return compare(
            name, variants=variants, dtypes=types, device=device,
            on_progress=lambda done, total: bars.update(task, completed=done, total=total),
        )  # fmt: skip
