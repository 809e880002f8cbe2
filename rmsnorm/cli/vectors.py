"""``rmsnorm vectors``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from rmsnorm.cli.usage import progress

EPILOG: Final = (
    "Example: `rmsnorm vectors vectors`\n\n"
    "docs/checking.md describes the files. Exit status: 0 written, 2 wrong usage or the folder cannot be written."
)


def vectors(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="An empty folder, or one that does not exist yet.")],
) -> None:
    """Write golden test vectors in files, for implementations that Python cannot call.

    DIR becomes the folder vectors/ of the repository: JSON and text with the inputs, and of each output the interval of
    each element. A program reads it without this package. The same version writes the same bytes every time;
    manifest.json has the digests.
    """
    from rmsnorm.parity.vectors import write

    with progress("files") as bars:
        task = bars.add_task("write", total=None)
        count = write(folder, on_progress=lambda done, total: bars.update(task, completed=done, total=total))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    Console(soft_wrap=True).print(f"{count} tests, {size / 1e6:.1f} MB in {folder}", highlight=False)
