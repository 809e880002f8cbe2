"""``rmsnorm selftest``."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import TaskID

from rmsnorm import PRESETS
from rmsnorm.cli.reports import Json, write_reports
from rmsnorm.cli.usage import BACKEND_NAMES, DEVICES, Dtypes, backends, choices, end_of_check, progress
from rmsnorm.specification import dtypes

_COMMAND: Final = "rmsnorm selftest"
_SLOWEST_FIRST: Final = ("flax", "numpy", "tf", "torch")
EPILOG: Final = (
    "Examples:\n\n"
    "    rmsnorm selftest\n\n"
    "    rmsnorm selftest --all\n\n"
    "    rmsnorm selftest --backend torch --variant llama --dtype bfloat16\n\n"
    "    rmsnorm selftest --backend flax --device cuda --json parity.json\n\n"
    "Exit status: 0 everything agrees, 1 a backend differs, crashed, hung or was stopped, 2 wrong usage, "
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
    all_: Annotated[
        bool, typer.Option("--all", help="Compare every case in every variant and dtype that it has.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Print the largest distance to the golden for each variant.",
            rich_help_panel="Reports",
        ),
    ] = False,
    json: Json = None,
) -> None:
    """Compare every backend of this package with the golden: values, gradients and derivatives.

    Every variant is compared in every dtype, and each case in one variant and dtype; with --all, --variant or --dtype
    a case is compared in each variant and dtype that it has. `rmsnorm check TARGET` compares your own function or
    layer, and says what the golden and the parity ratio are. The NumPy backend checks the golden itself, against the
    paper's R matrix and against finite differences.
    """
    from rmsnorm.parity import report
    from rmsnorm.parity.cases import select
    from rmsnorm.parity.run import NO_LARGE, job_of, run

    chosen = backends(backend, _COMMAND)
    variants = choices("variant", variant, tuple(PRESETS), _COMMAND) if variant else ()
    types = choices("dtype", dtype, dtypes.FLOATS, _COMMAND) if dtype else ()
    choices("device", [device], DEVICES, _COMMAND)
    brief = not (all_ or variants or types)
    jobs = {
        name: job_of(
            name, variants=variants, dtypes=types, device=device if name != "numpy" or backend else "cpu", brief=brief
        )
        for name in chosen
    }
    totals = {name: sum(1 for _ in select(variants, types, brief=brief, large=name not in NO_LARGE)) for name in jobs}
    with progress() as bars:
        tasks: dict[str, TaskID] = {name: bars.add_task(name, total=total) for name, total in totals.items()}
        slowest_first = {name: jobs[name] for name in sorted(jobs, key=_SLOWEST_FIRST.index)}
        runs = run(
            slowest_first, asked=totals, on_progress=lambda state: bars.update(tasks[state.name], completed=state.cases)
        )
    runs.sort(key=lambda state: chosen.index(state.name))
    Console(soft_wrap=True).print(report.terminal(runs, tables=verbose))
    write_reports(runs, json)
    end_of_check(runs, requested=bool(backend))
