"""``rmsnorm check``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import TaskID
from rich.text import Text

from rmsnorm import PRESETS, dtypes, screen
from rmsnorm.cli.reports import Html, Json, Junit, Markdown, check_folders, write_reports
from rmsnorm.cli.usage import BACKEND_NAMES, DEVICES, DIFFERS, UNUSABLE, backends, choices, progress, unusable
from rmsnorm.files import write_text

if TYPE_CHECKING:
    from rmsnorm.parity.run import BackendRun

_SLOWEST_FIRST: Final = ("flax", "numpy", "tf", "torch")
_of_target = partial(typer.Option, rich_help_panel="Of a TARGET")
EPILOG: Final = (
    "Examples:\n\n"
    "    rmsnorm check\n\n"
    "    rmsnorm check --all\n\n"
    "    rmsnorm check --backend torch --variant llama --dtype bfloat16\n\n"
    "    rmsnorm check --backend flax --device cuda --json parity.json --junit parity.xml\n\n"
    "    rmsnorm check my_norm:norm --variant llama --eps 1e-5 --dtype bfloat16\n\n"
    "Exit status: 0 everything agrees, 1 a backend or the target differs, crashed, hung or was stopped, 2 wrong usage, "
    "a requested backend is not installed, or no comparison was made."
)


def check(
    target: Annotated[
        str | None,
        typer.Argument(
            help="Your own: module:attribute or file.py:attribute of a function, a layer or its class; an .onnx file.",
            show_default="the backends of this package",
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Backend to check: {BACKEND_NAMES}. Repeatable. Of a TARGET, the framework.", show_default="all"
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="Variant to check, such as llama. Repeatable. Of a TARGET, what it should be, or standard.",
            show_default="all",
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"Dtype of x: {', '.join(dtypes.FLOATS)}. Repeatable.", show_default="all")
    ] = None,
    device: Annotated[str, typer.Option(help=f"Device: {' or '.join(DEVICES)} (NumPy always runs on cpu).")] = "cpu",
    all_: Annotated[
        bool, typer.Option("--all", help="Compare every case in every variant and dtype that it has.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the cases and exit.")] = False,
    eps: Annotated[
        float | None, _of_target(help="The eps that a TARGET should have.", show_default="that of the variant")
    ] = None,
    edges: Annotated[
        bool,
        _of_target(
            "--edges",
            help="A TARGET fails if it raises for x of no rows, no columns, 66,001 columns, one mask of all rows.",
        ),
    ] = False,
    batch_invariant: Annotated[
        bool,
        _of_target("--batch-invariant", help="A TARGET fails if a row's bits depend on the number of rows."),
    ] = False,
    exhaustive: Annotated[
        bool,
        _of_target("--exhaustive", help="Also every number of f16 and bf16 as an element of rows of a TARGET."),
    ] = False,
    large: Annotated[
        bool,
        _of_target("--large", help="Also y of 2^31 elements of a TARGET: 16 GB or more, and minutes."),
    ] = False,
    json: Json = None,
    junit: Junit = None,
    markdown: Markdown = None,
    html: Html = None,
) -> None:
    """Compare every backend with the golden: values, gradients and derivatives, in every variant and dtype.

    Every variant is compared in every dtype, and each case in one variant and dtype; with --all, --variant or --dtype
    a case is compared in each variant and dtype that it has. With a TARGET, rmsnorm.parity.check compares the TARGET
    with one variant, with each of mask, residual and gate that it takes, alone and together, in every dtype. If one of
    these is in no comparison, the check fails. If the TARGET differs, the report says what it computes. It runs in a
    process of its own, which is ended where it is not called for four minutes.

    The golden runs in NumPy in 106-bit arithmetic and rounds where the variant says. The parity ratio is a distance in
    units of the rounding error of the terms that add up to an element, so cancellation does not count as a defect.
    rmsnorm/accuracy/bounds.py derives each bound. The NumPy backend checks the golden itself, against the paper's R
    matrix and against finite differences.
    """
    from rmsnorm.parity import report

    check_folders("rmsnorm check", json, junit, markdown, html)
    if target is not None:
        if all_ or list_:
            raise unusable("rmsnorm check: expected no --all and no --list beside a TARGET; leave them out")
        options = {"edges": edges, "batch_invariant": batch_invariant, "exhaustive": exhaustive, "large": large}
        runs = [_judged(target, backend or [], variant or [], eps, dtype or [], device, html, options)]
        html = None
    else:
        if eps is not None or edges or batch_invariant or exhaustive or large:
            unasked = "--eps, --edges, --batch-invariant, --exhaustive and --large"
            raise unusable(f"rmsnorm check: {unasked} are for a TARGET; name one")
        runs = _compared(backend, variant, dtype, device, all_=all_, list_=list_)
        if runs:
            screen.console().print(report.terminal(runs))
    write_reports(runs, json, junit, markdown, html)
    states = {state.status for state in runs}
    if states & {"differs", "crashed", "hung", "stopped"}:
        raise typer.Exit(DIFFERS)
    if "refused" in states or ("absent" in states and backend):
        raise typer.Exit(UNUSABLE)


def _judged(
    target: str,
    backend: list[str],
    variant: list[str],
    eps: float | None,
    dtype: list[str],
    device: str,
    html: Path | None,
    options: Mapping[str, Any],
) -> BackendRun:
    """The comparisons of somebody's target, printed."""
    from rmsnorm.parity import report
    from rmsnorm.parity.worker import check_apart

    choices("device", [device], DEVICES)
    names = choices("variant", variant, tuple(PRESETS)) if variant else ("standard",)
    for option, values in (("variant", names), ("backend", backend)):
        if len(values) > 1:
            raise unusable(
                f"rmsnorm check: --{option} is given {len(values)} times, expected one for a TARGET; drop some"
            )
    types = choices("dtype", dtype, dtypes.FLOATS) if dtype else None
    framework = next(iter(backend), None)
    wanted = PRESETS[names[0]] if eps is None else PRESETS[names[0]].replace(eps=eps)
    with Console(stderr=True).status(f"asking {target}"):
        judged = check_apart(target, wanted, framework=framework, dtypes=types, device=device, **options)
    screen.console().print(Text(judged.text, style="" if judged.run.status == "held" else "red"))
    if html and judged.page:
        write_text(html, judged.page)
    elif html:
        report.write_html([judged.run], html)
    return judged.run


def _compared(
    backend: list[str] | None,
    variant: list[str] | None,
    dtype: list[str] | None,
    device: str,
    *,
    all_: bool,
    list_: bool,
) -> list[BackendRun]:
    """The comparisons of the backends; none if the cases were listed."""
    from rmsnorm.parity.cases import select
    from rmsnorm.parity.run import NO_LARGE, run, worker_command

    chosen = backends(backend, "rmsnorm check")
    variants = choices("variant", variant, tuple(PRESETS)) if variant else ()
    types = choices("dtype", dtype, dtypes.FLOATS) if dtype else ()
    choices("device", [device], DEVICES)
    brief = not (all_ or variants or types)
    if list_:
        screen.console().print(_listing(variants, types, brief))
        return []
    commands = {
        name: worker_command(
            name,
            variants=variants,
            dtypes=types,
            device=device if name != "numpy" or backend else "cpu",
            brief=brief,
        )
        for name in chosen
    }
    totals = {
        name: sum(1 for _ in select(variants, types, brief=brief, large=name not in NO_LARGE)) for name in commands
    }
    with progress() as bars:
        tasks: dict[str, TaskID] = {name: bars.add_task(name, total=total) for name, total in totals.items()}
        slowest_first = {name: commands[name] for name in sorted(commands, key=_SLOWEST_FIRST.index)}
        runs = run(
            slowest_first,
            asked=totals,
            on_progress=lambda state: bars.update(tasks[state.name], completed=state.cases),
        )
    runs.sort(key=lambda state: chosen.index(state.name))
    return runs


def _listing(variants: tuple[str, ...], types: tuple[str, ...], brief: bool) -> screen.Fitting:
    from rmsnorm.parity.cases import CASES, select

    counts = Counter(case.name for case, _, _ in select(variants, types, brief=brief))
    rows = []
    for case in CASES:
        if counts[case.name]:
            names = "all" if len(case.variants) == len(PRESETS) else ", ".join(case.variants)
            rows.append((case.name, str(case.shape), names, case.reason, str(counts[case.name])))
    return screen.fitting_table(("case", "shape", "variants", "what it can show", "runs"), rows, ("variants", "shape"))
