"""``rmsnorm vectors write`` and ``rmsnorm vectors check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from rmsnorm import PRESETS
from rmsnorm.cli.reports import Json, write_reports
from rmsnorm.cli.usage import DIFFERS, Dtypes, choices, progress
from rmsnorm.specification import dtypes
from rmsnorm.specification.quantisation import QUANTISATIONS

app = typer.Typer(
    name="vectors", help="Golden test vectors in files, for implementations that Python cannot call.",
    no_args_is_help=True,
)  # fmt: skip
WRITE_EPILOG: Final = (
    "Examples:\n\n"
    "    rmsnorm vectors write vectors\n\n"
    "    rmsnorm vectors write vectors --variant llama --dtype bfloat16 --quantity y --quantity dx\n\n"
    "    rmsnorm vectors write vectors --static\n\n"
    "docs/ci.md describes the format, docs/own-repository.md that of --static. Exit status: 0 written, 2 wrong usage "
    "or the folder cannot be written."
)
CHECK_EPILOG: Final = (
    "Examples:\n\n"
    "    rmsnorm vectors check vectors --json parity.json\n\n"
    "Exit status: 0 everything agrees, 1 something differs or was not computed, 2 wrong usage or the vectors were "
    "changed."
)


@app.command(epilog=WRITE_EPILOG)
def write(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="An empty folder, or one that does not exist yet.")],
    variant: Annotated[
        list[str] | None, typer.Option(help="Variant to write, such as llama. Repeatable.", show_default="all")
    ] = None,
    dtype: Dtypes = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help="Case of rmsnorm/parity/cases.py. Repeatable.", show_default="all"),
    ] = None,
    quantity: Annotated[
        list[str] | None,
        typer.Option(help="Quantity that the other program computes, such as y or dx. Repeatable.", show_default="all"),
    ] = None,
    quantisation: Annotated[
        list[str] | None,
        typer.Option(
            help="In place of variants: the codes and scales of a quantisation, such as vllm.static. Repeatable.",
            show_default="none",
        ),
    ] = None,
    static: Annotated[
        bool,
        typer.Option("--static", help="The JSON files that a program reads without this package, all of them."),
    ] = False,
) -> None:
    """Write inputs, the golden's outputs and gradients, and the bounds of every case as safetensors.

    The other program reads DIR/NAME.safetensors and writes what it computes to DIR/outputs/NAME.safetensors. All cases
    take 67 MB. The same version writes the same bytes every time; manifest.json has the digests. With --static, DIR is
    the folder vectors/ of the repository: JSON and text with the interval of each element, which need no package.
    """
    from rmsnorm.accuracy.bounds import QUANTITIES
    from rmsnorm.parity import vectors
    from rmsnorm.parity.cases import CASES

    command = "rmsnorm vectors write"
    names = tuple(entry.name for entry in CASES)
    filters = {
        "variants": choices("variant", variant, tuple(PRESETS), command) if variant else (),
        "types": choices("dtype", dtype, dtypes.FLOATS, command) if dtype else (),
        "cases": choices("case", case, names, command) if case else (),
        "quantities": choices("quantity", quantity, QUANTITIES, command),
        "quantisations": choices("quantisation", quantisation, tuple(QUANTISATIONS), command) if quantisation else (),
    }
    with progress() as bars:
        task = bars.add_task("write", total=None)
        count = vectors.write(
            folder,
            **filters,
            static=static,
            on_progress=lambda done, total: bars.update(task, completed=done, total=total),
        )
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    unit = f"{'test' if static else 'case'}{'s' * (count != 1)}"
    Console(soft_wrap=True).print(f"{count} {unit}, {size / 1e6:.1f} MB in {folder}", highlight=False)


@app.command(epilog=CHECK_EPILOG)
def check(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="The folder of `rmsnorm vectors write`, with the folder outputs in it."),
    ],
    json: Json = None,
) -> None:
    """Compare the outputs that another program has written, DIR/outputs/NAME.safetensors, with the golden's.

    The report is like that of `rmsnorm check`. Every case in DIR counts, so write vectors only for the cases that the
    program computes.
    """
    from rmsnorm.parity import report, vectors

    with progress() as bars:
        task = bars.add_task("check", total=None)
        run = vectors.check(folder, on_progress=lambda done, total: bars.update(task, completed=done, total=total))
    Console(soft_wrap=True).print(report.terminal([run], tables=True))
    write_reports([run], json)
    if run.failures:
        raise typer.Exit(DIFFERS)
