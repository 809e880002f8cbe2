"""The command line. Loads no framework: each backend runs in a process of its own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from rmsnorm import PRESETS, Variant, __version__, dtypes, errors

BACKENDS: Final = ("numpy", "torch", "tf", "flax")
_WORK: Final = ("flax", "numpy", "tf", "torch")  # by how long they take
DEVICES: Final = ("cpu", "cuda")
_SHAPES: Final = ("1x4096", "32x768", "512x768", "8192x1024", "4096x4096")
HELD, DIFFERS, UNUSABLE = 0, 1, 2

app = typer.Typer(
    name="rmsnorm",
    help="One RMSNorm for NumPy, PyTorch, Keras/TensorFlow and Flax, held to one golden.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command(
    epilog="Examples:\n\n"
    "    rmsnorm check\n\n"
    "    rmsnorm check --backend torch --variant llama --dtype bfloat16\n\n"
    "    rmsnorm check --backend flax --device cuda --json parity.json --junit parity.xml\n\n"
    "Exit status: 0 all held, 1 something differs, crashed or hung, 2 bad usage or a requested backend is absent."
)
def check(
    backend: Annotated[
        list[str] | None, typer.Option(help=f"Backend to check: {', '.join(BACKENDS)}. Repeatable.", show_default="all")
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="Variant to check, such as llama. Repeatable.", show_default="all")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"Dtype of x: {', '.join(dtypes.FLOATS)}. Repeatable.", show_default="all")
    ] = None,
    device: Annotated[str, typer.Option(help=f"Where: {' or '.join(DEVICES)} (NumPy: cpu).")] = "cpu",
    json: Annotated[Path | None, typer.Option(help="Write every record as JSON.", dir_okay=False)] = None,
    junit: Annotated[Path | None, typer.Option(help="Write a JUnit report for CI.", dir_okay=False)] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the whole table as Markdown.", dir_okay=False)] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the cases and stop.")] = False,
) -> None:
    """Compare every backend with the golden: values, gradients and derivatives, in every variant and dtype.

    The golden is NumPy's, in 106-bit arithmetic, rounded where the variant says. A distance counts in units of the
    rounding error of the terms that make an element (the parity ratio), so that cancellation is not mistaken for a
    defect; each bound is derived in rmsnorm/parity/bounds.py. The NumPy backend checks the golden itself, against the
    paper's R matrix and against differences.
    """
    from rmsnorm.parity.run import run, worker_command

    chosen = _choices("backend", backend, BACKENDS)
    variants = _choices("variant", variant, tuple(PRESETS)) if variant else ()
    types = _choices("dtype", dtype, dtypes.FLOATS) if dtype else ()
    _choices("device", [device], DEVICES)
    if list_:
        Console().print(_listing(variants, types))
        return
    for path in (json, junit, markdown):
        if path is not None and not path.parent.is_dir():
            raise _unusable(f"rmsnorm check: {path.parent} is not a folder, expected one to write {path.name} in")
    commands = {
        name: worker_command(
            name, variants=variants, dtypes=types, device=device if name != "numpy" or backend else "cpu"
        )
        for name in chosen
    }
    from rmsnorm.parity import report
    from rmsnorm.parity.cases import select

    total = sum(1 for _ in select(variants, types))
    with _progress() as progress:
        bars: dict[str, TaskID] = {name: progress.add_task(name, total=total) for name in commands}
        slowest_first = {name: commands[name] for name in sorted(commands, key=_WORK.index)}
        runs = run(slowest_first, on_progress=lambda state: progress.update(bars[state.name], completed=state.cases))
    runs.sort(key=lambda state: chosen.index(state.name))
    Console().print(report.terminal(runs))
    if json:
        report.write_json(runs, json)
    if junit:
        report.write_junit(runs, junit)
    if markdown:
        report.write_markdown(runs, markdown)
    states = {state.status for state in runs}
    if states & {"differs", "crashed", "hung"}:
        raise typer.Exit(DIFFERS)
    if "refused" in states or ("absent" in states and backend):
        raise typer.Exit(UNUSABLE)


@app.command(
    epilog="Examples:\n\n"
    "    rmsnorm bench --backend torch --shape 512x768 --dtype float32\n\n"
    "    rmsnorm bench --backend flax --op fwd+bwd --seconds 5 --json flax.json --plot flax.svg\n\n"
    "    rmsnorm bench --backend torch --device cuda --variant llama --dtype bfloat16\n\n"
    "Exit status: 0 all timed, 1 one of ours is wrong or a backend crashed or hung, 2 bad usage or a requested backend "
    "is absent."
)
def bench(
    backend: Annotated[
        list[str] | None, typer.Option(help=f"Backend to time: {', '.join(BACKENDS)}. Repeatable.", show_default="all")
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
        typer.Option(help="Of x and the gain. float16 is the third. Repeatable.", show_default="float32, bfloat16"),
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="Variant of ours, such as llama.", show_default="that of the built-in layer")
    ] = None,
    device: Annotated[str, typer.Option(help=f"Where: {' or '.join(DEVICES)} (NumPy: cpu).")] = "cpu",
    seconds: Annotated[float, typer.Option(help="For a cell, all its candidates together.", min=0.0)] = 2.0,
    threads: Annotated[int | None, typer.Option(help="Cores to use.", min=1, show_default="all")] = None,
    json: Annotated[Path | None, typer.Option(help="Write every record as JSON.", dir_okay=False)] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw GB/s against size as SVG.", dir_okay=False)] = None,
) -> None:
    """Time ours beside the framework's own layer, that compiled, LayerNorm, and a copy of the same bytes.

    A cell is an op at a shape in a dtype. Its candidates take turns in one process, in random order; ours must first
    be right, by the bounds of `rmsnorm check`, or are not timed. The copy is the floor: forward reads x and writes y;
    backward reads x and dy and writes dx. Read the ratios: absolute times drift with the machine, ratios far less. The
    first two columns of ratios are the answer: how much faster than the built-in, how far from a copy.
    """
    from rmsnorm.bench import report
    from rmsnorm.bench.problem import DTYPES, OPS
    from rmsnorm.bench.run import run, worker_command

    command = "rmsnorm bench"
    chosen = _choices("backend", backend, BACKENDS, command)
    ops = _choices("op", op, tuple(OPS), command)
    types = _choices("dtype", dtype, DTYPES, command) if dtype else ("float32", "bfloat16")
    _choices("variant", [variant] if variant else None, tuple(PRESETS), command)
    _choices("device", [device], DEVICES, command)
    shapes = [_shape(entry) for entry in dict.fromkeys(shape or _SHAPES)]
    for path in (json, plot):
        if path is not None and not path.parent.is_dir():
            raise _unusable(f"{command}: {path.parent} is not a folder, expected one to write {path.name} in")
    if plot and find_spec("matplotlib") is None:
        raise _unusable(f"{command}: matplotlib is not installed, expected for --plot; pip install 'rmsnorm[plot]'")
    if threads and threads > (os.cpu_count() or threads):
        raise _unusable(str(errors.out_of_domain(command, "threads", threads, f"at most {os.cpu_count()}", "use less")))
    commands = {
        name: worker_command(
            name, ops=ops, shapes=shapes, dtypes=types, variant=variant, seconds=seconds, threads=threads,
            device=device if name != "numpy" or backend else "cpu",
        )
        for name in chosen
    }  # fmt: skip
    runs = []
    with _progress("cells") as progress:
        total = len(ops) * len(shapes) * len(types)
        bars = {name: progress.add_task(name, total=total, start=False) for name in chosen}
        for name, bar in bars.items():
            progress.start_task(bar)
            runs.append(run(name, commands[name], on_progress=lambda state: progress.update(
                bars[state.name], completed=state.cells)))  # fmt: skip
    Console(width=max(Console().width, report.WIDTH)).print(report.terminal(runs))
    if json:
        report.write_json(runs, {"seconds": seconds, "threads": threads}, json)
    if plot and any(state.records for state in runs):
        from rmsnorm.bench.plot import write_plot

        write_plot(runs, plot)
    states = {state.status for state in runs}
    if states & {"crashed", "hung"} or any(state.failures for state in runs):
        raise typer.Exit(DIFFERS)
    if "refused" in states or ("absent" in states and backend):
        raise typer.Exit(UNUSABLE)


def _shape(text: str) -> list[int]:
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise _unusable(str(errors.out_of_domain("rmsnorm bench", "shape", text, "sizes > 0", "write it as 4096x4096")))
    return [int(size) for size in sizes]


@app.command()
def variants(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of the README.")] = False,
) -> None:
    """List the variants of RMSNorm: what each name means."""
    rows = [_describe(preset) for preset in PRESETS.values()]
    if markdown:
        typer.echo("\n".join(f"| {' | '.join(row)} |" for row in (_COLUMNS, ("---",) * len(_COLUMNS), *rows)))
        return
    table = Table(*_COLUMNS, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(cell.replace("`", "") for cell in row))
    Console().print(table)


_COLUMNS: Final = (
    "variant",
    "eps, place",
    "rounded",
    "offset",
    "bias",
    "partial",
    "dtype of y",
    "gain's name",
    "source",
)


def _describe(variant: Variant) -> tuple[str, ...]:
    rounded = {"after_scale": "once, at the end", "before_scale": "before the gain", "input_dtype": "all in T"}
    result = {"x": "T", "scale": "G", "promote": "promote(T, G)", "half_scale": "G if 16-bit, else float32"}
    return (
        f"`{variant.name}`",
        f"{'machine eps' if variant.eps is None else f'{variant.eps:g}'.replace('e-0', 'e-')}, {variant.eps_position}",
        rounded[variant.rounding],
        f"{variant.scale_offset:g}",
        "yes" if variant.bias else "no",
        variant.partial_rounding,
        result[variant.result_dtype],
        f"`{variant.scale_name}`",
        variant.source,
    )


@app.command()
def invariances() -> None:
    """Run the paper's table of invariances: five norms, six transformations, and what the gradients keep.

    A cell holds when the output does not change beyond the rounding of float64; otherwise the size of the change is
    printed, relative to the output: a counter-example that ran.
    """
    from rmsnorm.numpy_impl.invariances import gradient_facts, table

    cells = table()
    sheet = Table(title="Unchanged under", title_justify="left")
    properties = list(dict.fromkeys(cell.property for cell in cells))
    sheet.add_column("norm", no_wrap=True)
    for name in properties:
        sheet.add_column(name, justify="center")
    for norm in dict.fromkeys(cell.norm for cell in cells):
        row = {cell.property: cell for cell in cells if cell.norm == norm}
        sheet.add_row(norm, *(_outcome(row[name].holds, row[name].change, row[name].expected) for name in properties))
    facts = Table(title="Gradients under", title_justify="left")
    for name in ("norm", "gradient", "transformation", "times", "off by", "bound"):
        facts.add_column(name)
    found = gradient_facts()
    for fact in found:
        times = (
            f"{fact.factor:.6g}" if fact.holds else f"[red]{fact.factor:.6g}, the paper says {fact.expected:.6g}[/red]"
        )
        facts.add_row(fact.norm, fact.gradient, fact.property, times, f"{fact.change:.1e}", f"{fact.bound:.1e}")
    Console().print(sheet, facts)
    if any(cell.holds != cell.expected for cell in cells) or not all(fact.holds for fact in found):
        raise typer.Exit(DIFFERS)


def _outcome(holds: bool, change: float, expected: bool) -> str:
    text = "holds" if holds else f"- ({change:.2g})"
    return text if holds == expected else f"[red]{text}, the paper says otherwise[/red]"


def _choices(
    name: str, given: Sequence[str] | None, known: Sequence[str], command: str = "rmsnorm check"
) -> tuple[str, ...]:
    for entry in given or ():
        if entry not in known:
            raise _unusable(str(errors.not_a_choice(command, name, entry, known)))
    return tuple(dict.fromkeys(given or known))


def _unusable(message: str) -> typer.Exit:
    Console(stderr=True).print(message, style="red", highlight=False, markup=False)
    return typer.Exit(UNUSABLE)


def _progress(unit: str = "cases") -> Progress:
    return Progress(
        TextColumn("{task.description:>6}"), BarColumn(), TextColumn(f"{{task.completed}}/{{task.total}} {unit}"),
        TimeElapsedColumn(), console=Console(stderr=True), transient=True,
    )  # fmt: skip


def _listing(variants: tuple[str, ...], types: tuple[str, ...]) -> Table:
    from rmsnorm.parity.cases import CASES, select

    counts = Counter(case.name for case, _, _ in select(variants, types))
    table = Table("case", "shape", "variants", "what it can tell", "runs")
    for case in CASES:
        if counts[case.name]:
            names = "all" if len(case.variants) == len(PRESETS) else ", ".join(case.variants)
            table.add_row(case.name, str(case.shape), names, case.reason, str(counts[case.name]))
    return table


if __name__ == "__main__":
    app()
